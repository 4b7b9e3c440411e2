# SPDX-License-Identifier: Apache-2.0
"""Invariant: training that is saved, loaded and continued has the bits of training that was never stopped, whatever the
optimizer, and loading alone changes no weight.

Covers one process; the layouts of several are in tests/distributed/test_checkpoint_reshard.py. Does not cover sampling
and rewards, whose draws are functions of the seed and the iteration.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing

from omni_engine.arguments import ParallelSettings
from omni_engine.checkpoint import latest_iteration, load_checkpoint, read_state, save_checkpoint
from omni_engine.parallel import ParallelGroups
from tests.small_training import OPTIMIZER, Trainee, build_trainee

KINDS: dict[str, dict[str, Any]] = {
    "float32": {"bf16": False, "parallel": ParallelSettings()},
    "bf16": {"bf16": True, "parallel": ParallelSettings()},
    "float32, distributed": {"bf16": False, "parallel": ParallelSettings(use_distributed_optimizer=True)},
    "bf16, distributed": {"bf16": True, "parallel": ParallelSettings(use_distributed_optimizer=True)},
}
# The fast set has one of each: a plain optimizer, and the one with most to get wrong.
EACH_KIND = [
    pytest.param(kind, marks=[pytest.mark.fast] if kind in ("float32", "bf16, distributed") else []) for kind in KINDS
]
STATE = {"seed": 5, "prompts": "abc", "consumed": [1, 2]}


def save(trainee: Trainee, root: Path, iteration: int = 2, state: dict[str, Any] | None = None) -> None:
    save_checkpoint(root, iteration, trainee.policy, trainee.optimizer, STATE if state is None else state)


def load(trainee: Trainee, root: Path) -> dict[str, Any]:
    return load_checkpoint(root, trainee.policy, trainee.optimizer).state


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different


@pytest.mark.parametrize("kind", EACH_KIND)
def test_two_steps_and_two_after_loading_are_four(
    kind: str, tmp_path: Path, small_folder: Path, single_process: ParallelGroups
) -> None:
    unbroken = build_trainee(small_folder, single_process, **KINDS[kind])
    unbroken.train(0, 1)
    save(unbroken, tmp_path)
    half_way = unbroken.weights()
    unbroken.train(2, 3)

    resumed = build_trainee(small_folder, single_process, **KINDS[kind])
    assert load(resumed, tmp_path) == STATE
    assert_equal(resumed.weights(), half_way)
    assert resumed.policy.version == 2
    resumed.train(2, 3)
    assert_equal(resumed.weights(), unbroken.weights())
    assert resumed.policy.version == unbroken.policy.version == 4
    text_stream = "blocks.0.text.mlp_out.weight"  # of the last block: it never gets a gradient
    decayed = resumed.policy.parameters()[text_stream]
    assert torch.equal(decayed, unbroken.weights()[text_stream])


@pytest.mark.parametrize("kind", EACH_KIND)
def test_a_step_with_learning_rate_zero_after_loading_changes_no_weight(
    kind: str, tmp_path: Path, small_folder: Path, single_process: ParallelGroups
) -> None:
    """Float32 weights behind 16-bit ones that were not loaded would overwrite them at this step."""
    trained = build_trainee(small_folder, single_process, **KINDS[kind])
    trained.train(0, 1)
    save(trained, tmp_path)
    still = replace(OPTIMIZER, lr=0.0, min_lr=0.0)
    resumed = build_trainee(small_folder, single_process, optimizer=still, **KINDS[kind])
    load(resumed, tmp_path)
    resumed.train(2)
    assert_equal(resumed.weights(), trained.weights())


@pytest.mark.parametrize("kind", EACH_KIND)
def test_a_run_that_has_not_stepped_can_be_saved_and_resumed(
    kind: str, tmp_path: Path, small_folder: Path, single_process: ParallelGroups
) -> None:
    never_saved = build_trainee(small_folder, single_process, **KINDS[kind])
    never_saved.train(0, 1)
    unbroken = build_trainee(small_folder, single_process, **KINDS[kind])
    save(unbroken, tmp_path, iteration=0)
    unbroken.train(0, 1)
    assert_equal(unbroken.weights(), never_saved.weights())
    resumed = build_trainee(small_folder, single_process, **KINDS[kind])
    load(resumed, tmp_path)
    resumed.train(0, 1)
    assert_equal(resumed.weights(), unbroken.weights())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
def test_the_other_kind_of_optimizer_continues_the_run(
    bf16: bool, distributed: bool, tmp_path: Path, small_folder: Path, single_process: ParallelGroups
) -> None:
    parallel = [ParallelSettings(use_distributed_optimizer=on) for on in (distributed, not distributed)]
    unbroken = build_trainee(small_folder, single_process, parallel[0], bf16=bf16)
    unbroken.train(0, 1)
    save(unbroken, tmp_path)
    unbroken.train(2)
    resumed = build_trainee(small_folder, single_process, parallel[1], bf16=bf16)
    load(resumed, tmp_path)
    resumed.train(2)
    for name, weight in unbroken.weights().items():
        torch.testing.assert_close(resumed.weights()[name], weight)


@pytest.mark.fast
def test_hyperparameters_are_those_of_the_flags_and_the_schedule_goes_on(
    tmp_path: Path, small_folder: Path, single_process: ParallelGroups
) -> None:
    trained = build_trainee(small_folder, single_process)
    trained.train(0, 1)
    save(trained, tmp_path)
    other = replace(OPTIMIZER, lr=3e-2, weight_decay=0.5, adam_beta1=0.8)
    resumed = build_trainee(small_folder, single_process, optimizer=other)
    load(resumed, tmp_path)
    for group in resumed.optimizer.optimizer.param_groups:
        assert group["lr"] == pytest.approx(3e-2 * 2 / 3)  # two of three steps of the warm-up are done
        assert group["weight_decay"] == 0.5 * group["wd_mult"]
        assert group["betas"][0] == 0.8


@pytest.mark.fast
def test_generators_go_on_where_they_stood(tmp_path: Path, small_folder: Path, single_process: ParallelGroups) -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))]

    trainee = build_trainee(small_folder, single_process)
    draw()
    save(trainee, tmp_path)
    expected = draw()
    load(trainee, tmp_path)
    assert draw() == expected


@pytest.mark.fast
def test_megatron_reads_the_folder(tmp_path: Path, small_folder: Path, single_process: ParallelGroups) -> None:
    trained = build_trainee(small_folder, single_process)
    trained.train(0)
    save(trained, tmp_path)
    tensors = dist_checkpointing.load_plain_tensors(str(tmp_path / "iter_0000002"))
    mapping, weights = trained.policy.family.mapping, trained.weights()
    trainable = trained.policy.trained_parameters()
    for path, entry in mapping.entries.items():
        for name, piece in zip(entry.sources, entry.split(weights[path]), strict=True):
            assert torch.equal(tensors[name], piece), name
            moment = tensors.get(f"optimizer.state.exp_avg.{name}")
            assert moment.dtype == torch.float32 if path in trainable else moment is None


@pytest.mark.fast
def test_saving_an_iteration_again_replaces_it(
    tmp_path: Path, small_folder: Path, single_process: ParallelGroups
) -> None:
    trainee = build_trainee(small_folder, single_process)
    save(trainee, tmp_path, iteration=1, state={"try": 1})
    save(trainee, tmp_path, iteration=3, state={"try": 1})
    trainee.train(0)
    save(trainee, tmp_path, iteration=1, state={"try": 2})
    assert latest_iteration(tmp_path) == 1
    assert read_state(tmp_path).state == {"try": 2}
    assert read_state(tmp_path, 3).state == {"try": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000001",
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]
    trained = trainee.weights()
    load(trainee, tmp_path)
    assert_equal(trainee.weights(), trained)
