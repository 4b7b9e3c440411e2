# SPDX-License-Identifier: Apache-2.0
"""Invariant: a run with adapters trains them and nothing else, from the frozen model on: before the first update every
ratio is exactly 1 and the KL term exactly 0, and its reference stays the frozen model while the adapters move. The
gradient is autograd's of the whole model.

Not covered: the layer's own formulas (tests/parallel/test_lora.py), several processes (tests/distributed).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omni_engine.arguments import AlgorithmSettings, LoraSettings
from omni_engine.models.mapping import is_adapter
from omni_engine.parallel import ParallelGroups, without_adapters
from tests.engine_parts import Engine, Setup, build_engine


def build(folder: Path, groups: ParallelGroups, bf16: bool = False) -> Engine:
    algorithm = AlgorithmSettings(updates_per_rollout=1, kl_coef=0.1)
    gap = 1.0 if bf16 else 0.0
    setup = Setup(algorithm=algorithm, lora=LoraSettings(lora_rank=4), bf16=bf16, max_log_prob_gap=gap)
    return build_engine(folder, groups, setup)


@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.fast), True])
def test_adapters_train_from_the_frozen_model_on_and_nothing_else_moves(
    bf16: bool, folder: Path, single_process: ParallelGroups
) -> None:
    engine = build(folder, single_process, bf16)
    before = engine.weights()
    results = [engine.updater.run(engine.sample(step), engine.scored(step)) for step in range(2)]
    assert results[0]["parity/first_ratio_max_deviation"] == results[0]["policy/kl"] == 0.0
    assert results[1]["policy/kl"] > 0.0
    after = engine.weights()
    still = {name for name, value in after.items() if torch.equal(value, before[name])}
    assert still == set(engine.policy.base_parameters())
    assert engine.policy.adapters().keys() == {name for name in after if is_adapter(name)} == engine.gradients().keys()


@pytest.mark.fast
def test_the_optimizer_holds_adapters_only(folder: Path, single_process: ParallelGroups) -> None:
    engine = build(folder, single_process)
    held = sum(p.numel() for group in engine.optimizer.optimizer.param_groups for p in group["params"])
    buffers = sum(buffer.numel for chunk in engine.optimizer.ddp for buffer in chunk.buffers)
    assert held == buffers == sum(parameter.numel() for parameter in engine.policy.adapters().values())


def test_the_samples_before_training_are_those_of_the_model_without_adapters(
    folder: Path, single_process: ParallelGroups
) -> None:
    """Of the frozen model: torch may choose another matrix product for a weight that is trained."""
    engine = build(folder, single_process)
    adapted = engine.sample().segments["image"]
    with without_adapters(engine.policy.chunks):
        plain = engine.sample().segments["image"]
    assert torch.equal(adapted.x_next, plain.x_next) and torch.equal(adapted.log_prob, plain.log_prob)


def test_recomputation_changes_no_bit_of_the_gradient(folder: Path, single_process: ParallelGroups) -> None:
    """On the first stage the tokens before the first adapter ask for no gradient, and what is made of them must be made
    again all the same."""
    found = {}
    for recompute in ("none", "selective", "full"):
        setup = Setup(algorithm=AlgorithmSettings(updates_per_rollout=1), lora=LoraSettings(lora_rank=2))
        engine = build_engine(folder, single_process, replace(setup, recompute=recompute))
        with torch.no_grad():
            for path, parameter in engine.policy.adapters().items():
                if path.endswith("up"):
                    parameter.fill_(0.01)
        engine.updater.run(engine.sample(), engine.scored())
        found[recompute] = engine.gradients()
    for name, gradient in found["none"].items():
        assert torch.equal(found["selective"][name], gradient), name
        assert torch.equal(found["full"][name], gradient), name
    assert all(bool(gradient.any()) for name, gradient in found["none"].items() if name.startswith("blocks.0"))
