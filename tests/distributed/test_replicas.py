# SPDX-License-Identifier: Apache-2.0
"""Invariant: with `--check-param-sync` a weight that one rank holds differently, by a single bit or two exchanged
elements, stops all ranks at the step where it happens, and the message names the weight by its Hugging Face name, the
ranks and the step; weights that differ rightly, being shards, stop nothing. And with `--overlap-param-gather` a rank
holds old weights of other ranks right after a step, but neither a forward pass nor who asks for them by
`finish_param_sync` ever sees them.

Everything is compared bit for bit. Not covered: more than two ranks (but for the wording), a difference in what is no
weight, such as Adam's moments.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omni_engine.training.replicas import _sides
from tests.engine_parts import make_folder
from tests.helpers import run_torchrun

pytestmark = pytest.mark.timeout(900)
WORKER = Path(__file__).with_name("replica_worker.py")
KEYS, BIAS = "transformer_blocks.0.attn.to_k.weight", "transformer_blocks.1.img_mlp.net.0.proj.bias"
OUT_BIAS = "transformer_blocks.1.attn.to_out.0.bias"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the ranks found, which must be the same."""
    folder = make_folder(tmp_path_factory.mktemp("replicas"), layers=2)
    result = run_torchrun(WORKER, 2, str(folder), env={"OMNI_PLATFORM": "cpu"}, timeout=600)
    assert result.returncode == 0, result.stderr[-6000:]
    first, second = (json.loads((folder / f"found.{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    return first


@pytest.mark.parametrize("case", ["sound", "sound tp", "sound overlap", "sharded bit tp"])
def test_weights_that_differ_rightly_stop_nothing(found: dict[str, Any], case: str) -> None:
    assert found[case] is None


@pytest.mark.parametrize(
    ("case", "name", "step"),
    [
        ("bit", KEYS, 1),
        ("exchange", BIAS, 1),
        ("bit tp", OUT_BIAS, 1),
        ("bit overlap", KEYS, 1),
        ("every third step", KEYS, 3),
    ],
)
def test_a_divergence_stops_the_run_and_names_the_weight(
    found: dict[str, Any], case: str, name: str, step: int
) -> None:
    told = (
        f"after optimizer step {step} ranks that must hold the same weights do not: {name} (rank 1 differs from rank 0)"
    )
    assert found[case].startswith(told + ". Resume from an earlier checkpoint")


def test_nothing_reads_weights_before_they_are_gathered(found: dict[str, Any]) -> None:
    claims = {name: value for name, value in found.items() if isinstance(value, bool)}
    assert len(claims) == 6
    assert all(claims.values()), claims


@pytest.mark.fast
def test_the_few_are_said_to_differ_from_the_many() -> None:
    assert _sides([[0, 2, 3], [1]]) == "rank 1 differs from ranks 0, 2, 3"
    assert _sides([[0, 1], [2, 3]]) == "ranks 2, 3 differ from ranks 0, 1"
    assert _sides([[0], [1], [2, 3]]) == "rank 1 differs from rank 0 differs from ranks 2, 3"
