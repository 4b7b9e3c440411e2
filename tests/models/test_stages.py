# SPDX-License-Identifier: Apache-2.0
"""Invariant: stages are contiguous and never empty, cover every block once, and no cut is better.

Compared with a search over all cuts. Does not cover the costs themselves, nor memory.
"""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from omni_engine.models.stages import cut_stages

pytestmark = pytest.mark.fast

COSTS = [[1, 1, 1, 1], [1] * 10, [5, 1, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6], [9, 1, 1, 9, 1], [3], [2, 2, 9, 2, 2, 2, 2]]


def smallest_largest_cost(costs: list[int], stages: int) -> int:
    cuts = combinations(range(1, len(costs)), stages - 1)
    bounds = ([0, *cut, len(costs)] for cut in cuts)
    return min(max(sum(costs[a:b]) for a, b in pairwise(bound)) for bound in bounds)


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_no_cut_is_better(costs: list[int]) -> None:
    for stages in range(1, len(costs) + 1):
        cut = cut_stages(costs, stages)
        assert [block for stage in cut for block in stage] == list(range(len(costs)))
        assert all(len(stage) > 0 for stage in cut) and len(cut) == stages
        assert max(sum(costs[block] for block in stage) for stage in cut) == smallest_largest_cost(costs, stages)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 2"):
        cut_stages([1, 1], 3)
