# SPDX-License-Identifier: Apache-2.0
"""Invariant: ids, groups, prompts, window and the update a sample belongs to follow from (seed, iteration) and the
sample's number alone, whatever the number of replicas; a group's samples stay on one replica and in one update.

Not covered: that the processes of a real job agree (tests/distributed), and the order of prompts (tests/data).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from omni_engine.arguments import RolloutSettings
from omni_engine.flow import sde_window
from omni_engine.parallel import ParallelGroups
from omni_engine.rollout import IterationPlan, micro_batches, plan_iteration

pytestmark = pytest.mark.fast
SETTINGS = RolloutSettings(prompts_per_step=16, samples_per_prompt=3, sde_window_size=2, sde_window_range=(0, 5))
PROMPTS = [f"prompt {slot}" for slot in range(SETTINGS.prompts_per_step)]
UPDATES, SEED = 2, 11


def replica(dp_rank: int, dp_size: int) -> ParallelGroups:
    """A place among data-parallel replicas of one process each, without process groups."""
    of_one: dict[str, Any] = {}
    for field in fields(ParallelGroups):
        of_one[field.name] = 1 if field.name.endswith("_size") else 0 if field.name.endswith("rank") else None
    return ParallelGroups(**of_one | {"dp_rank": dp_rank, "dp_size": dp_size})


def plans(dp_size: int, iteration: int = 0, updates: int = UPDATES) -> list[IterationPlan]:
    return [plan_iteration(iteration, PROMPTS, updates, SETTINGS, SEED, replica(r, dp_size)) for r in range(dp_size)]


def facts(plan: IterationPlan, updates: int = UPDATES) -> dict[int, tuple[int, str, int]]:
    """Group, prompt and update of every sample; the updater takes equal runs of a rank's samples."""
    per_update = len(plan.ids) // updates
    return {
        sample: (group, plan.prompts[prompt], position // per_update)
        for position, (sample, group, prompt) in enumerate(
            zip(plan.ids.tolist(), plan.groups.tolist(), plan.prompt_of.tolist(), strict=True)
        )
    }


@pytest.mark.parametrize("dp_size", [2, 4, 8])
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("iteration", [0, 5])
def test_the_number_of_replicas_changes_nothing_of_a_sample(dp_size: int, updates: int, iteration: int) -> None:
    (alone,) = plans(1, iteration, updates)
    together: dict[int, tuple[int, str, int]] = {}
    for plan in plans(dp_size, iteration, updates):
        mine = facts(plan, updates)
        assert not set(mine) & set(together), "two replicas make one sample"
        assert len(mine) == len(PROMPTS) * SETTINGS.samples_per_prompt // dp_size
        assert plan.window == alone.window
        together |= mine
    assert together == facts(alone, updates)


def test_a_group_is_whole_on_its_replica_and_has_the_prompt_of_its_slot() -> None:
    for plan in plans(4):
        for group in plan.groups.unique().tolist():
            members = plan.groups == group
            assert int(members.sum()) == SETTINGS.samples_per_prompt
            assert {plan.prompts[index] for index in plan.prompt_of[members].tolist()} == {PROMPTS[group]}
            positions = members.nonzero().flatten()
            assert torch.equal(positions, torch.arange(int(positions[0]), int(positions[0]) + len(positions)))


def test_each_update_takes_its_equal_part_of_the_slots() -> None:
    (alone,) = plans(1)
    half = len(PROMPTS) // UPDATES
    assert all(update == group // half for group, _, update in facts(alone).values())


def test_ids_are_never_used_twice_in_a_run() -> None:
    seen: set[int] = set()
    for iteration in range(4):
        ids = {sample for plan in plans(2, iteration) for sample in plan.ids.tolist()}
        assert len(ids) == SETTINGS.samples_per_step and not ids & seen
        seen |= ids


def test_the_window_is_that_of_seed_and_iteration() -> None:
    windows = [plans(1, iteration)[0].window for iteration in range(20)]
    assert windows == [sde_window(SEED, iteration, 2, (0, 5)) for iteration in range(20)]
    assert len(set(windows)) > 1


def test_micro_batches_are_runs_that_cover_all() -> None:
    assert micro_batches(7, 3) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert micro_batches(4, 4) == [slice(0, 4)] and micro_batches(0, 4) == []
