# SPDX-License-Identifier: Apache-2.0
"""Invariant: the learning rate belongs to the iteration, however many updates it has; each step counts one version of
the weights; the gradient's norm is measured with and without clipping.

Not covered: Megatron's optimizer itself, and its sharding (tests/distributed).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from omni_engine.arguments import AlgorithmSettings, OptimizerSettings
from omni_engine.parallel import ParallelGroups
from tests.engine_parts import Engine, Setup, build_engine

pytestmark = pytest.mark.fast
Build = Callable[..., Engine]


@pytest.fixture
def build(folder: Path, single_process: ParallelGroups) -> Build:
    def build(updates: int = 2, **changes: object) -> Engine:
        optimizer = OptimizerSettings(micro_batch_size=2, **changes)  # type: ignore[arg-type]
        algorithm = AlgorithmSettings(updates_per_rollout=updates)
        return build_engine(folder, single_process, Setup(algorithm=algorithm, optimizer=optimizer))

    return build


@pytest.mark.parametrize("updates", [1, 2])
def test_the_learning_rate_moves_once_an_iteration(build: Build, updates: int) -> None:
    engine = build(updates, lr=4e-4, lr_warmup_iters=2, lr_decay_style="linear", lr_decay_iters=6, min_lr=0.0)
    rates = []
    for iteration in range(4):
        rates.append(engine.updater.run(engine.sample(iteration), engine.scored(iteration))["optimizer/learning_rate"])
    assert rates == pytest.approx([0.0, 2e-4, 4e-4, 3e-4], rel=1e-6)
    assert engine.policy.version == 4 * updates


def test_the_norm_is_that_of_the_gradient_before_clipping(build: Build) -> None:
    norms, weights = [], []
    for clip in (0.0, 1e-3):
        engine = build(1, lr=1e-2, clip_grad=clip, adam_eps=1.0, weight_decay=0.0)
        before = engine.weights()
        norms.append(engine.updater.run(engine.sample(), engine.scored())["optimizer/grad_norm"])
        weights.append({name: value - before[name] for name, value in engine.weights().items()})
    assert norms[0] == norms[1] > 1e-2
    # With so large an epsilon Adam's step is in proportion to the gradient.
    step = {name: float(value.norm()) for name, value in weights[0].items() if name.endswith("head.weight")}
    clipped = float(weights[1]["head.weight"].norm())
    assert clipped == pytest.approx(step["head.weight"] * 1e-3 / norms[0], rel=1e-2)


def test_what_the_optimizer_reports_is_the_norm_of_all_gradients(build: Build) -> None:
    engine = build(1, clip_grad=0.0)
    metrics = engine.updater.run(engine.sample(), engine.scored())
    total = torch.stack([gradient.norm() for gradient in engine.gradients().values()]).norm()
    assert metrics["optimizer/grad_norm"] == pytest.approx(float(total), rel=1e-5)
