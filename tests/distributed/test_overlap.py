# SPDX-License-Identifier: Apache-2.0
"""Invariant: a run that overlaps its communication is the run that does not: same checkpoint, same export and, but for
the last digits of a norm, same metrics, bit for bit. Between a step and the next forward pass a rank holds old weights
of the others, so whatever reads weights outside of a forward pass would show it: saving, exporting, the moving average.

Two replicas, whose sums do not depend on their order. Not covered: three and more (test_layout_parity compares them to
rounding), other devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from omni_engine.checkpoint import SavedWeights
from tests.runs import flags, metrics, succeeded

pytestmark = pytest.mark.timeout(1800)

SHARED = {
    "train_iters": 2,
    "kl_coef": 0.1,
    "use_distributed_optimizer": True,
    "check_param_sync": False,  # it would gather the weights by itself
    "ema_decay": 0.9,
    "ema_interval": 1,
    "export_weights": "ema",
    "save_interval": 1,
}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 1}
MEASURED = ("time/", "memory/", "throughput/", "wall_time")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of the run that waits and of the one that overlaps."""
    folders = []
    for changes in ({}, OVERLAP):
        folder = tmp_path_factory.mktemp("run")
        succeeded(flags(folder, {**SHARED, **changes, "export_hf": folder / "exported"}), processes=2)
        folders.append(folder)
    return folders


def test_the_numbers_are_the_same(runs: list[Path]) -> None:
    def numbers(record: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in record.items() if not key.startswith(MEASURED)}

    waiting, overlapping = ([numbers(record) for record in metrics(folder / "run")] for folder in runs)
    assert len(waiting) == 2
    for one, other in zip(waiting, overlapping, strict=True):
        # The squares are added up bucket by bucket.
        assert one.pop("optimizer/grad_norm") == pytest.approx(other.pop("optimizer/grad_norm"), rel=1e-6)
        assert one == other


def test_the_checkpoints_are_the_same(runs: list[Path]) -> None:
    waiting, overlapping = (dict(SavedWeights(folder / "run" / "checkpoints")) for folder in runs)
    assert set(waiting) == set(overlapping)
    assert all(torch.equal(weight, overlapping[name]) for name, weight in waiting.items())


def test_the_exported_averages_are_the_same(runs: list[Path]) -> None:
    file = Path("exported", "transformer", "diffusion_pytorch_model.safetensors")
    waiting, overlapping = (load_file(folder / file) for folder in runs)
    assert set(waiting) == set(overlapping)
    assert all(torch.equal(weight, overlapping[name]) for name, weight in waiting.items())
    saved = dict(SavedWeights(runs[0] / "run" / "checkpoints"))
    assert any(not torch.equal(weight, saved[name]) for name, weight in waiting.items())  # it is the average
