# SPDX-License-Identifier: Apache-2.0
"""Invariant: a run with adapters, and the average of a run's weights, go on after a resume with the bits of the
unbroken run; a checkpoint of adapters holds those and no frozen weight; one of another form is refused by what differs.

Covers one process; other layouts are in tests/distributed/test_checkpoint_reshard.py, exports in test_lora_export.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from omni_engine.arguments import LoraSettings, ParallelSettings
from omni_engine.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from omni_engine.checkpoint.record import check_same_run
from omni_engine.checkpoint.storage import CheckedReader
from omni_engine.parallel import ParallelGroups
from tests.small_training import Trainee, build_trainee

LORA = LoraSettings(lora_rank=2, lora_alpha=6.0)
KINDS: dict[str, dict[str, Any]] = {
    "adapters": {"lora": LORA},
    "adapters and average, bf16, distributed": {
        "lora": LORA,
        "ema_decay": 0.9,
        "bf16": True,
        "parallel": ParallelSettings(use_distributed_optimizer=True),
    },
    "average": {"ema_decay": 0.9},
}


def save(trainee: Trainee, root: Path) -> None:
    save_checkpoint(root, 2, trainee.policy, trainee.optimizer, {})


def state(trainee: Trainee) -> dict[str, torch.Tensor]:
    average = trainee.optimizer.average
    averages = {} if average is None else {f"ema.{name}": value.clone() for name, value in average.weights.items()}
    return trainee.weights() | averages


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.fast) if "and" in kind else kind for kind in KINDS]
)
def test_two_steps_and_two_after_loading_are_four(
    kind: str, tmp_path: Path, small_folder: Path, single_process: ParallelGroups
) -> None:
    unbroken = build_trainee(small_folder, single_process, **KINDS[kind])
    unbroken.train(0, 1)
    save(unbroken, tmp_path)
    half_way = state(unbroken)
    unbroken.train(2, 3)
    resumed = build_trainee(small_folder, single_process, **KINDS[kind])
    load_checkpoint(tmp_path, resumed.policy, resumed.optimizer)
    assert all(torch.equal(value, half_way[name]) for name, value in state(resumed).items())
    resumed.train(2, 3)
    expected = state(unbroken)
    assert [name for name, value in state(resumed).items() if not torch.equal(value, expected[name])] == []
    assert any(not torch.equal(value, half_way[name]) for name, value in expected.items())


@pytest.mark.fast
def test_a_checkpoint_of_adapters_holds_no_frozen_weight(
    tmp_path: Path, small_folder: Path, single_process: ParallelGroups
) -> None:
    trainee = build_trainee(small_folder, single_process, lora=LORA, ema_decay=0.9)
    trainee.train(0)
    save(trainee, tmp_path)
    held = CheckedReader(tmp_path / "iter_0000002").tensors
    prefixes = ("", "ema.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    entries = trainee.policy.mapping.of(trainee.policy.adapters()).values()
    names = {name for entry in entries for name in entry.sources}
    assert set(held) == {prefix + name for prefix in prefixes for name in names}
    assert tuple(held["transformer_blocks.0.attn.to_k.lora_A.weight"].size) == (2, 64)
    assert tuple(held["ema.transformer_blocks.0.attn.to_k.lora_B.weight"].size) == (64, 2)


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        (LORA, None, "adapters of rank 2 and alpha 6 on .*, and this run trains all weights: set --lora-rank"),
        (None, LORA, "all weights, and this run trains adapters of rank 2"),
        (LORA, LoraSettings(lora_rank=4, lora_alpha=6.0), "rank 2 .* trains adapters of rank 4"),
        (LORA, LoraSettings(lora_rank=2), "alpha 6 .* alpha 4"),
        (LORA, LoraSettings(lora_rank=2, lora_alpha=6.0, lora_target_modules=("to_q",)), "rank 2 .* on to_q: set"),
    ],
)
def test_other_adapters_are_refused(
    saved: LoraSettings | None,
    now: LoraSettings | None,
    message: str,
    tmp_path: Path,
    small_folder: Path,
    single_process: ParallelGroups,
) -> None:
    save(build_trainee(small_folder, single_process, lora=saved), tmp_path)
    resumed = build_trainee(small_folder, single_process, lora=now)
    before = state(resumed)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path, resumed.policy, resumed.optimizer)
    assert all(torch.equal(value, before[name]) for name, value in state(resumed).items())


def test_an_average_begins_with_a_run_and_may_be_dropped(
    tmp_path: Path, small_folder: Path, single_process: ParallelGroups
) -> None:
    for name, decay in (("with", 0.9), ("without", 0.0)):
        trainee = build_trainee(small_folder, single_process, ema_decay=decay)
        trainee.train(0)
        save(trainee, tmp_path / name)
    keeping = build_trainee(small_folder, single_process, ema_decay=0.9)
    with pytest.raises(CheckpointError, match="holds no average of the weights: set --ema-decay 0"):
        load_checkpoint(tmp_path / "without", keeping.policy, keeping.optimizer)
    plain = build_trainee(small_folder, single_process)
    load_checkpoint(tmp_path / "with", plain.policy, plain.optimizer)


@pytest.mark.fast
def test_a_run_from_before_there_were_adapters_had_none() -> None:
    """Its saved identity does not tell of them."""
    check_same_run({"seed": 1}, {"seed": 1, "lora_rank": None})
    with pytest.raises(CheckpointError, match="lora_rank was not saved and is 2"):
        check_same_run({"seed": 1}, {"seed": 1, "lora_rank": 2})
