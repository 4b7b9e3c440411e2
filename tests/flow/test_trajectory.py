# SPDX-License-Identifier: Apache-2.0
"""Invariant: samples that exist are consistent, and joining and selecting them loses or reorders nothing.

Every refusal plants one fault in samples that are accepted without it. Not covered: whether a log-prob belongs to its
latents, which the parity check of the training step measures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from omni_engine.flow import FlowSegment, Samples, SchedulerConfig, flow_match_schedule

pytestmark = pytest.mark.fast

SCHEDULE = flow_match_schedule(SchedulerConfig(shift=3.0), 10, 8)


def make_segment(batch: int, **changes: Any) -> FlowSegment:
    settings: dict[str, Any] = {
        "modality": "image",
        "expert": "transformer",
        "schedule": SCHEDULE,
        "sde_type": "sde",
        "noise_level": 0.7,
        "guidance_scale": 1.0,
        "convention": "normalized",
        "steps": (2, 3),
        "x_t": torch.randn(batch, 2, 4, 6),
        "x_next": torch.randn(batch, 2, 4, 6),
        "log_prob": torch.randn(batch, 2, dtype=torch.float64),
    }
    return FlowSegment(**(settings | changes))


def make_samples(
    ids: list[int], groups: list[int], prompts: list[str], prompt_of: list[int], **changes: Any
) -> Samples:
    settings: dict[str, Any] = {"weight_version": 5, "segments": {"image": make_segment(len(ids))}}
    return Samples(torch.tensor(ids), torch.tensor(groups), prompts, torch.tensor(prompt_of), **(settings | changes))


def test_cat_then_select_gives_the_parts_back() -> None:
    first = make_samples([4, 5, 6, 7], [2, 2, 3, 3], ["two", "three"], [0, 0, 1, 1])
    second = make_samples([9, 8], [3, 1], ["three", "one"], [0, 1])
    joined = Samples.cat([first, second])
    assert len(joined) == 6 and joined.prompts == ["two", "three", "one"]
    assert joined.prompt_of.tolist() == [0, 0, 1, 1, 1, 2]
    for part, index in ((first, torch.arange(4)), (second, torch.tensor([4, 5]))):
        back = joined.select(index)
        assert torch.equal(back.ids, part.ids) and torch.equal(back.groups, part.groups)
        assert [back.prompts[i] for i in back.prompt_of] == [part.prompts[i] for i in part.prompt_of]
        assert back.weight_version == 5
        for name in ("x_t", "x_next", "log_prob"):
            assert torch.equal(getattr(back.segments["image"], name), getattr(part.segments["image"], name))


def test_two_groups_may_have_equal_texts() -> None:
    joined = Samples.cat([make_samples([0], [0], ["same"], [0]), make_samples([1], [1], ["same"], [0])])
    assert joined.prompts == ["same", "same"] and joined.prompt_of.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["x_t", "x_next", "log_prob"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_trajectories_are_refused(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=name):
        make_segment(3, **{name: getattr(make_segment(3), name).to(dtype)})


@pytest.mark.parametrize("name", ["x_t", "x_next", "log_prob"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused_with_sample_and_step(name: str, value: float) -> None:
    segment = make_segment(3)
    getattr(segment, name)[1, 1] = value
    with pytest.raises(ValueError, match=f"{name} of sample 41 at step 3 is not finite"):
        make_samples([40, 41, 42], [0, 0, 0], ["p"], [0, 0, 0], segments={"image": segment})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": (3, 2)}, "must rise"),
        ({"steps": (2, 2)}, "must rise"),
        ({"steps": (2,)}, "K=2 in number"),
        ({"steps": (9, 10)}, "outside the schedule"),
        ({"x_next": torch.randn(3, 2, 4, 5)}, r"\[B, K, I, C\]"),
        ({"log_prob": torch.randn(3, 1, dtype=torch.float64)}, r"log_prob \[B, K\]"),
        ({"convention": "flow_grpo_cps"}, "disagree"),
        ({"sde_type": "cps"}, "disagree"),
        ({"sde_type": "ode"}, "no log-prob"),
        ({"sde_type": "cps", "convention": "flow_grpo_cps", "steps": (8, 9)}, r"steps \[9\] have no log-prob"),
        ({"noise_level": 0.0}, "no log-prob"),
    ],
)
def test_segments_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_segment(3, **changes)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1, 2, 1], [0, 0, 0], ["p"], [0, 0, 0]), ValueError, r"more than once: \[1\]"),
        (([1, 2], [0, 0, 0], ["p"], [0, 0, 0]), TypeError, "groups must be int64"),
        (([1, 2], [0, 0], ["p", "q"], [0, 1]), ValueError, "one prompt of its own"),
        (([1, 2], [0, 1], ["p"], [0, 0]), ValueError, "one prompt of its own"),
        (([1, 2], [0, 0], ["p", "unused"], [0, 0]), ValueError, "keep the used ones"),
        (([1, 2], [0, 0], ["p"], [1, 1]), ValueError, "keep the used ones"),
        (([1.0, 2.0], [0, 0], ["p"], [0, 0]), TypeError, "ids must be int64"),
    ],
)
def test_samples_that_do_not_fit_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_samples(*arguments)


def test_a_segment_with_other_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="3 rows for 2 samples"):
        make_samples([1, 2], [0, 0], ["p"], [0, 0], segments={"image": make_segment(3)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": flow_match_schedule(SchedulerConfig(shift=2.9), 10, 8)}, "schedule"),
        ({"steps": (3, 4)}, "steps"),
        ({"noise_level": 0.71}, "noise_level"),
        ({"guidance_scale": 4.0}, "guidance_scale"),
        ({"sde_type": "dance_sde"}, "sde_type"),
        ({"expert": "low_noise"}, "expert"),
    ],
)
def test_samples_of_other_settings_do_not_join(changes: dict[str, Any], message: str) -> None:
    first = make_samples([1], [0], ["p"], [0])
    other = make_samples([2], [0], ["p"], [0], segments={"image": make_segment(1, **changes)})
    with pytest.raises(ValueError, match=f"cannot join {message}"):
        Samples.cat([first, other])


def test_other_weights_prompts_or_segments_do_not_join() -> None:
    first = make_samples([1], [0], ["p"], [0])
    with pytest.raises(ValueError, match=r"weight versions \[5, 6\]"):
        Samples.cat([first, make_samples([2], [0], ["p"], [0], weight_version=6)])
    with pytest.raises(ValueError, match="two prompts"):
        Samples.cat([first, make_samples([2], [0], ["q"], [0])])
    with pytest.raises(ValueError, match="segments"):
        Samples.cat([first, replace(make_samples([2], [0], ["p"], [0]), segments={})])
    with pytest.raises(ValueError, match="more than once"):
        Samples.cat([first, first])
    with pytest.raises(ValueError, match="more than once"):
        first.select(torch.tensor([0, 0]))
