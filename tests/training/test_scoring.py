# SPDX-License-Identifier: Apache-2.0
"""Invariant: a reward reaches the sample whose picture was scored; a sample without one is masked and counted and its
value is in no statistic; an iteration without any reward, or a scorer pool that loses one, stops the run.

Not covered: the pool itself (tests/reward), and how rewards travel between processes (tests/distributed).
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from omni_engine.flow import Samples
from omni_engine.parallel import ParallelGroups
from omni_engine.reward import Reward, RewardPool
from omni_engine.rollout import RolloutChunk
from omni_engine.training.optimizer import TrainingError
from omni_engine.training.scoring import RewardCollector, ScoredBatch

pytestmark = pytest.mark.fast


class Handle:
    def __init__(self, rewards: list[Reward]) -> None:
        self.rewards = rewards

    def result(self) -> list[Reward]:
        return self.rewards


class BrightnessPool:
    """The reward of a picture is its first pixel over 10; a white picture cannot be scored."""

    def __init__(self, lost: int = 0) -> None:
        self.asked: list[str] = []
        self.lost = lost

    def submit(self, images: np.ndarray, prompts: list[str]) -> Handle:
        self.asked += prompts
        values = [int(image[0, 0, 0]) for image in images]
        rewards = [Reward(None, failure="white") if value == 255 else Reward(value / 10) for value in values]
        return Handle(rewards[: len(rewards) - self.lost])


def chunk(ids: list[int], values: list[int]) -> RolloutChunk:
    """Samples of two a group, with pictures of one brightness each."""
    groups = torch.tensor(ids) // 2
    used, prompt_of = groups.unique(return_inverse=True)
    prompts = [f"prompt {group}" for group in used.tolist()]
    images = np.stack([np.full((2, 2, 3), value, dtype=np.uint8) for value in values])
    return RolloutChunk(Samples(torch.tensor(ids), groups, prompts, prompt_of, 0, {}), images)


def collector(groups: ParallelGroups, pool: BrightnessPool) -> RewardCollector:
    return RewardCollector(cast("RewardPool", pool), groups)


def test_a_reward_reaches_its_sample_whatever_the_order(single_process: ParallelGroups) -> None:
    pool = BrightnessPool()
    rewards = collector(single_process, pool)
    rewards.submit(chunk([14, 15, 10], [4, 5, 0]))
    rewards.submit(chunk([11, 12, 13], [1, 255, 3]))
    ids = torch.tensor([14, 15, 10, 11, 12, 13])
    scored = rewards.collect(ids, ids // 2 - 5)
    assert pool.asked == [f"prompt {slot}" for slot in (7, 7, 5, 5, 6, 6)]
    assert scored.rewards.tolist() == [0.0, 0.1, 0.0, 0.3, 0.4, 0.5] and scored.rewards.dtype == torch.float64
    assert scored.valid.tolist() == [True, True, False, True, True, True]
    assert scored.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert scored.local.tolist() == [4, 5, 0, 1, 2, 3], "where this rank's samples stand among all"


def test_the_next_iteration_starts_empty(single_process: ParallelGroups) -> None:
    rewards = collector(single_process, BrightnessPool())
    for first in (0, 4):
        rewards.submit(chunk([first, first + 1], [first, first + 1]))
        scored = rewards.collect(torch.tensor([first, first + 1]), torch.tensor([0, 0]))
        assert scored.rewards.tolist() == [first / 10, (first + 1) / 10]


def test_an_iteration_that_cannot_be_scored_stops_with_the_reason(single_process: ParallelGroups) -> None:
    rewards = collector(single_process, BrightnessPool())
    rewards.submit(chunk([0, 1], [255, 255]))
    with pytest.raises(TrainingError, match="the last reason was: white"):
        rewards.collect(torch.tensor([0, 1]), torch.tensor([0, 0]))


def test_a_pool_that_loses_a_reward_is_noticed(single_process: ParallelGroups) -> None:
    rewards = collector(single_process, BrightnessPool(lost=1))
    rewards.submit(chunk([0, 1], [1, 2]))
    with pytest.raises(ValueError):
        rewards.collect(torch.tensor([0, 1]), torch.tensor([0, 0]))


def scored(rewards: list[float], valid: list[bool], size: int = 2) -> dict[str, float]:
    groups = torch.arange(len(rewards)) // size
    local = torch.arange(len(rewards))
    return ScoredBatch(torch.tensor(rewards, dtype=torch.float64), groups, torch.tensor(valid), local).metrics()


def test_statistics_are_of_the_valid_samples_alone() -> None:
    metrics = scored([1.0, 3.0, 2.0, 2.0, 1e9, 5.0, 1e9, 1e9], [True] * 4 + [False, True, False, False])
    assert metrics["reward/mean"] == pytest.approx((1 + 3 + 2 + 2 + 5) / 5)
    assert metrics["reward/std_within_group"] == pytest.approx((2**0.5 + 0) / 2), "of the groups with two and more"
    assert metrics["reward/zero_std_ratio"] == 0.5
    assert metrics["rollout/failed_samples"] == 3
    assert metrics["rollout/masked_samples"] == 4, "a sample that is left alone in its group has no advantage either"


def test_statistics_without_any_whole_group_are_numbers() -> None:
    metrics: dict[str, Any] = scored([1.0, 9.0, 2.0, 9.0], [True, False, True, False])
    assert metrics["reward/mean"] == 1.5 and metrics["reward/std_within_group"] == 0.0
    assert metrics["rollout/masked_samples"] == 4
