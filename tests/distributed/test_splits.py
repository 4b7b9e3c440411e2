# SPDX-License-Identifier: Apache-2.0
"""Invariant: how 16 samples are split over replicas and micro-batches changes neither the loss of an update nor its
gradient: 1, 2 and 4 replicas with micro-batches of 1 to 8 give what one process gives in a single micro-batch.

Tolerance 1e-5 relative, of loss, gradient norm and the norm of every gradient: sums are added in another order (2e-7 of
the loss and 1e-6 of a gradient were measured at most, and no difference of the norm). A share that is averaged over the
wrong count is off by a half or more.

Not covered: samples that could not be scored and updates of unequal size (test_layout_parity), other layouts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.engine_parts import make_folder
from tests.helpers import run_torchrun

pytestmark = pytest.mark.timeout(1200)
WORKER = Path(__file__).with_name("splits_worker.py")
WHOLE = 16
SIZES = {1: (WHOLE, 1, 2, 4, 8), 2: (1, 2, 4, 8), 4: (1, 2, 4)}
"""Micro-batches by number of replicas; one of four replicas has four samples."""
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("splits"), layers=2)
    for replicas, sizes in SIZES.items():
        result = run_torchrun(
            WORKER, replicas, str(folder), *map(str, sizes), env={"OMNI_PLATFORM": "cpu"}, timeout=600
        )
        assert result.returncode == 0, result.stderr[-6000:]
    return folder


def found(folder: Path, replicas: int, size: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients and metrics, which all ranks must hold alike."""
    ranks = []
    for rank in range(replicas):
        with safe_open(folder / f"{replicas}-{size}.{rank}.safetensors", "pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a dict
            ranks.append((tensors, json.loads(handle.metadata()["metrics"])))
    for tensors, metrics in ranks[1:]:
        assert metrics == ranks[0][1]
        assert all(torch.equal(tensors[name], value) for name, value in ranks[0][0].items())
    return ranks[0]


@pytest.mark.parametrize(
    ("replicas", "size"), [(n, size) for n, sizes in SIZES.items() for size in sizes if size != WHOLE]
)
def test_a_split_changes_neither_loss_nor_gradient(folder: Path, replicas: int, size: int) -> None:
    expected, expected_metrics = found(folder, 1, WHOLE)
    gradients, metrics = found(folder, replicas, size)
    assert abs(expected_metrics["policy/loss"]) > 1e-4  # a relative error of zero would say nothing
    for name in ("policy/loss", "optimizer/grad_norm"):
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=TOLERANCE), name
    assert set(gradients) == set(expected)
    errors = {
        name: float((gradients[name] - value).norm() / value.norm()) for name, value in expected.items() if value.any()
    }
    assert max((error, name) for name, error in errors.items()) < (TOLERANCE,)
