# SPDX-License-Identifier: Apache-2.0
"""Invariant: the model FLOPs of an iteration are the sum over its samples of what torch counts for a prompt without
padding, times the passes of the algorithm; utilisation is never invented where the peak is unknown.

Equal. Does not cover several replicas, whose sums are gathered (the layouts of a run are in tests/distributed).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omni_engine.arguments import RolloutSettings
from omni_engine.models.costs import forward_flops, training_flops
from omni_engine.models.guidance import Guidance
from omni_engine.parallel import ParallelGroups
from omni_engine.platform import get_platform
from omni_engine.training.throughput import FlopsMeter
from tests.engine_parts import Engine, Setup, build_engine

pytestmark = pytest.mark.fast

ROLLOUT = RolloutSettings(prompts_per_step=4, samples_per_prompt=2, num_inference_steps=4, sde_window_range=(0, 2))


@pytest.fixture(scope="module")
def engine(folder: Path, single_process: ParallelGroups) -> Engine:
    return build_engine(folder, single_process, Setup(rollout=ROLLOUT))


def meter_of(
    engine: Engine, rollout: RolloutSettings = ROLLOUT, reference: bool = False, peak: float = 1.0
) -> FlopsMeter:
    engine.encoder.prepare(engine.plan().prompts, Guidance(rollout.true_cfg_scale, rollout.cfg_gradient))
    return FlopsMeter(engine.policy, engine.encoder, rollout, reference, peak)


def flops(engine: Engine, tokens: int, forward: int, training: int) -> int:
    """So many passes of one sample."""
    parts = engine.family.costs(engine.policy.shape.tokens, tokens).parts
    return forward * forward_flops(parts) + training * training_flops(parts)


@pytest.mark.parametrize(
    ("changes", "reference", "forward", "negative", "training_of_negative"),
    [
        ({}, False, 4, 0, 0),
        ({"old_log_prob": "recompute"}, True, 8, 0, 0),
        ({"true_cfg_scale": 3.0}, False, 4, 4, 2),
        ({"true_cfg_scale": 3.0, "cfg_gradient": "conditional"}, True, 6, 8, 0),
    ],
    ids=["plain", "reference and old log-probs", "guided", "detached branch"],
)
def test_an_iteration_counts_its_passes(
    engine: Engine,
    changes: dict[str, object],
    reference: bool,
    forward: int,
    negative: int,
    training_of_negative: int,
) -> None:
    meter, plan = meter_of(engine, replace(ROLLOUT, **changes), reference), engine.plan()
    meter.count(plan)
    lengths = [len(plan.prompts[prompt]) for prompt in plan.prompt_of.tolist()]
    assert len(set(lengths)) > 1, "prompts differ in length, so that padding would show"
    expected = sum(flops(engine, length, forward, 2) for length in lengths)
    expected += len(lengths) * flops(engine, len(ROLLOUT.negative_prompt), negative, training_of_negative)
    assert meter.flops == expected


def test_rates_are_of_a_device_and_of_its_peak(engine: Engine) -> None:
    meter = meter_of(engine, peak=2.0)
    meter.count(engine.plan())
    rates = meter.rates(seconds=0.5)
    assert rates["throughput/tflops_per_device"] == pytest.approx(meter.flops / 0.5 / 1e12)
    assert rates["throughput/mfu"] == pytest.approx(meter.flops / 0.5 / 2e12)


def test_the_platform_is_asked_for_the_peak(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []

    def peak_flops(dtype: torch.dtype) -> float | None:
        asked.append(dtype)
        return None

    monkeypatch.setattr(get_platform(), "peak_flops", peak_flops)
    meter = meter_of(engine, peak=0.0)
    meter.count(engine.plan())
    assert asked == [torch.float32] and "throughput/mfu" not in meter.rates(1.0)
    assert meter.rates(1.0)["throughput/tflops_per_device"] > 0
