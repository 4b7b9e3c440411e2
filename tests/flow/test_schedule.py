# SPDX-License-Identifier: Apache-2.0
"""Invariant: our schedule is the table diffusers' scheduler makes when QwenImagePipeline calls it, bit for bit.

An option that is not implemented is refused, never ignored. Not covered: the pipeline's own call (its `linspace` and
`calculate_shift` are repeated here), other pipelines' ways to call the scheduler.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from omni_engine.flow import Schedule, SchedulerConfig, flow_match_schedule

pytestmark = pytest.mark.fast

QWEN_IMAGE = {
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "invert_sigmas": False,
    "shift_terminal": 0.02,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "time_shift_type": "exponential",
    "stochastic_sampling": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen_image": QWEN_IMAGE,
    "dynamic_exponential": {"use_dynamic_shifting": True},
    "dynamic_linear": {"use_dynamic_shifting": True, "time_shift_type": "linear"},
    "static": {"shift": 3.0},
    "static_terminal": {"shift": 2.0, "shift_terminal": 0.1},
    "plain": {},
}


def diffusers_schedule(settings: dict[str, Any], steps: int, image_tokens: int) -> FlowMatchEulerDiscreteScheduler:
    scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    config = scheduler.config
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    mu = image_tokens * slope + (config.base_shift - slope * config.base_image_seq_len)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return scheduler


@pytest.mark.parametrize("steps", [2, 3, 10, 28, 50])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_diffusers_bit_for_bit(name: str, steps: int) -> None:
    for image_tokens in (8, 256, 1024, 4096, 6889):
        expected = diffusers_schedule(CONFIGS[name], steps, image_tokens)
        ours = flow_match_schedule(SchedulerConfig(**CONFIGS[name]), steps, image_tokens)
        assert torch.equal(ours.sigmas, expected.sigmas)
        assert torch.equal(ours.timesteps, expected.timesteps)
        assert ours.num_steps == steps and ours.sigmas[0] == 1.0 and ours.sigmas[-1] == 0.0


def test_the_shift_follows_the_image_size_only_if_dynamic() -> None:
    dynamic, static = SchedulerConfig(**QWEN_IMAGE), SchedulerConfig(shift=3.0)
    assert flow_match_schedule(dynamic, 10, 8) != flow_match_schedule(dynamic, 10, 4096)
    assert flow_match_schedule(static, 10, 8) == flow_match_schedule(static, 10, 4096)


def test_another_number_of_steps_is_another_schedule() -> None:
    config = SchedulerConfig(**QWEN_IMAGE)
    fingerprints = {flow_match_schedule(config, steps, 256).fingerprint() for steps in range(2, 50)}
    assert len(fingerprints) == 48


def test_fingerprint_sees_one_bit_of_either_table() -> None:
    schedule = flow_match_schedule(SchedulerConfig(shift=3.0), 10, 256)
    for name in ("sigmas", "timesteps"):
        tables = {"sigmas": schedule.sigmas.clone(), "timesteps": schedule.timesteps.clone()}
        tables[name][3] = torch.nextafter(tables[name][3], torch.tensor(0.0))
        other = Schedule(**tables)
        assert other.fingerprint() != schedule.fingerprint()
        assert other != schedule
    assert hash(Schedule(schedule.sigmas.clone(), schedule.timesteps.clone())) == hash(schedule)


def test_a_table_rounded_to_bfloat16_is_another_schedule() -> None:
    schedule = flow_match_schedule(SchedulerConfig(shift=3.0), 10, 256)
    rounded = Schedule(schedule.sigmas, schedule.sigmas[:-1].bfloat16().float() * 1000)
    assert rounded != schedule
    assert (rounded.timesteps - schedule.timesteps).abs().max() > 1.0  # the fault, in model time


@pytest.mark.parametrize(
    "option",
    [
        {"use_karras_sigmas": True},
        {"use_exponential_sigmas": True},
        {"use_beta_sigmas": True},
        {"invert_sigmas": True},
        {"stochastic_sampling": True},
        {"time_shift_type": "cosine"},
        {"shift_terminal": 1.0},
        {"shift": 0.0},
        {"use_dynamic_shifting": True, "max_shift": None},
    ],
)
def test_options_that_are_not_implemented_are_refused_by_name(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=list(option)[-1]):
        SchedulerConfig(**option)


def test_config_is_read_as_diffusers_saves_it(tmp_path: Path) -> None:
    FlowMatchEulerDiscreteScheduler(**QWEN_IMAGE).save_pretrained(tmp_path)
    assert SchedulerConfig.from_json(tmp_path) == SchedulerConfig(**QWEN_IMAGE)
    assert SchedulerConfig.from_json(tmp_path / "scheduler_config.json") == SchedulerConfig(**QWEN_IMAGE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"_class_name": "UniPCMultistepScheduler"}, "UniPCMultistepScheduler is not supported"),
        ({"shift": 3.0, "order": 2}, r"unknown scheduler settings \['order'\]"),
        ({"use_beta_sigmas": True}, "use_beta_sigmas=True is not implemented"),
    ],
)
def test_a_config_we_cannot_follow_is_refused_with_its_file(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "scheduler_config.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as error:
        SchedulerConfig.from_json(file)
    assert str(file) in str(error.value)


def test_impossible_tables_are_refused() -> None:
    good = flow_match_schedule(SchedulerConfig(shift=3.0), 4, 256)
    with pytest.raises(TypeError, match="float32"):
        Schedule(good.sigmas.double(), good.timesteps)
    with pytest.raises(ValueError, match=r"N \+ 1 sigmas"):
        Schedule(good.sigmas[:-1], good.timesteps)
    with pytest.raises(ValueError, match="fall strictly"):
        Schedule(good.sigmas.flip(0), good.timesteps)
    with pytest.raises(ValueError, match="fall strictly"):
        Schedule(good.sigmas + 0.1, good.timesteps)
    with pytest.raises(ValueError, match="not finite"):
        Schedule(good.sigmas * float("nan"), good.timesteps)
    with pytest.raises(ValueError, match="at least 1"):
        flow_match_schedule(SchedulerConfig(), 0, 256)
    with pytest.raises(ValueError, match="num_inference_steps >= 2"):
        flow_match_schedule(SchedulerConfig(**QWEN_IMAGE), 1, 256)
