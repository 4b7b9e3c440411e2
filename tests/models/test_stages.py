# SPDX-License-Identifier: Apache-2.0
"""Invariant: stages are contiguous and never empty, cover every block once, and no cut is better: none has a smaller
largest work, and of those with that work none has a smaller largest memory. A layout by hand is taken as it is or
refused with a remedy. The micro-batches in flight are those of Megatron's schedules.

Compared with a search over all cuts, and with a replay of the order of passes. Does not cover the costs themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest

from omni_engine.models.stages import BlockSpec, Weights, cut_stages, in_flight, stages_from_layout

pytestmark = pytest.mark.fast

COSTS = [[1, 1, 1, 1], [1] * 10, [5, 1, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6], [9, 1, 1, 9, 1], [3], [2, 2, 9, 2, 2, 2, 2]]


def spec(work: int, weights: int = 1) -> BlockSpec:
    return BlockSpec("toy", Weights(weights), work={"all": work})


def early_stages_hold_more(stage: int, parts: Sequence[BlockSpec]) -> int:
    return sum(part.parameters for part in parts) * 10 // (stage + 1)


def every_cut(blocks: int, stages: int) -> Iterator[list[range]]:
    for cut in combinations(range(1, blocks), stages - 1):
        yield [range(a, b) for a, b in pairwise([0, *cut, blocks])]


def largest(cut: list[range], specs: Sequence[BlockSpec], first: BlockSpec, last: BlockSpec) -> tuple[int, int]:
    """Largest work and largest memory of a stage."""
    parts = [list(specs[stage.start : stage.stop]) for stage in cut]
    parts[0].insert(0, first)
    parts[-1].append(last)
    return (
        max(sum(part.multiply_adds for part in stage) for stage in parts),
        max(early_stages_hold_more(index, stage) for index, stage in enumerate(parts)),
    )


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize("weigh", [lambda cost: 3, lambda cost: 10 - cost], ids=["equal weights", "opposite weights"])
def test_no_cut_is_better(costs: list[int], weigh) -> None:
    specs = [spec(cost, weigh(cost)) for cost in costs]
    first, last = spec(1, 7), spec(2, 2)
    for stages in range(1, len(costs) + 1):
        cut = cut_stages(specs, stages, first=first, last=last, memory=early_stages_hold_more)
        assert [block for stage in cut for block in stage] == list(range(len(costs)))
        assert all(len(stage) > 0 for stage in cut) and len(cut) == stages
        best = min(largest(other, specs, first, last) for other in every_cut(len(costs), stages))
        assert largest(cut, specs, first, last) == best


def test_blocks_that_are_left_over_go_where_memory_is() -> None:
    equal = [spec(1)] * 10
    assert [len(stage) for stage in cut_stages(equal, 4)] == [3, 3, 2, 2]
    assert [len(stage) for stage in cut_stages(equal, 4, memory=early_stages_hold_more)] == [1, 3, 3, 3]
    assert [len(stage) for stage in cut_stages(equal, 4, first=spec(0, 1))] == [2, 3, 3, 2]


def test_a_large_model_is_cut_at_once() -> None:
    """60 blocks over up to 60 stages: a search over all cuts would take 10^17 of them."""
    for stages in (7, 16, 60):
        assert sum(map(len, cut_stages([spec(1)] * 60, stages, memory=early_stages_hold_more))) == 60


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 2"):
        cut_stages([spec(1), spec(1)], 3)


def test_a_layout_by_hand_is_taken_as_it_is() -> None:
    assert stages_from_layout((1, 3, 2), 6, 3) == [range(1), range(1, 4), range(4, 6)]
    assert stages_from_layout((), 6, 3) == []


@pytest.mark.parametrize(
    ("layout", "remedy"),
    [((3, 3), "give 3 numbers"), ((0, 3, 3), "at least 1"), ((1, 2, 2), "add 1"), ((3, 3, 2), "take away 2")],
)
def test_a_layout_that_does_not_fit_is_refused(layout: tuple[int, ...], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        stages_from_layout(layout, 6, 3)


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 3), (2, 1), (2, 5), (4, 4), (4, 16)])
def test_earlier_stages_keep_more_micro_batches(pp: int, micro_batches: int) -> None:
    most = [max(held for (held,) in in_flight(rank, pp, 1, micro_batches)) for rank in range(pp)]
    assert most == [min(micro_batches, pp - rank) for rank in range(pp)]


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), [(2, 2, 2), (2, 2, 8), (4, 2, 4), (4, 3, 16)])
def test_interleaved_stages_keep_what_megatron_keeps(pp: int, vpp: int, micro_batches: int) -> None:
    """Megatron's own table of chunks and number of warm-up passes, replayed."""
    from megatron.core.pipeline_parallel.schedules import get_schedule_table  # omni_engine has to be imported first

    chunks = [chunk for _, chunk in get_schedule_table(micro_batches, vpp, pp)]
    for rank in range(pp):
        warmup = min(2 * (pp - rank - 1) + (vpp - 1) * pp, len(chunks))
        backward, held = 0, [0] * vpp
        expected = []
        for turn, chunk in enumerate(chunks):
            held[chunk] += 1
            expected.append(tuple(held))
            if turn >= warmup:
                held[vpp - 1 - chunks[backward]] -= 1
                backward += 1
        assert list(in_flight(rank, pp, vpp, micro_batches)) == expected
        assert all(count >= 0 for counts in expected for count in counts)
