# SPDX-License-Identifier: Apache-2.0
"""Blocks as a list of specs with a cost, and the cut of that list into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockSpec:
    """One transformer block.

    Attributes:
        kind: what class of block it is.
        parameters: number of weights.
        multiply_adds: of one forward pass of one sample.
    """

    kind: str
    parameters: int
    multiply_adds: int


def cut_stages(costs: Sequence[int], num_stages: int) -> list[range]:
    """Contiguous ranges of blocks, one a stage, with the smallest possible largest cost.

    Among cuts of equal cost the earliest stages take more blocks, as Megatron does.

    Raises:
        ValueError: there are fewer blocks than stages.
    """
    if num_stages > len(costs):
        raise ValueError(
            f"{len(costs)} blocks cannot fill {num_stages} pipeline stages; "
            f"set --pipeline-model-parallel-size to at most {len(costs)}"
        )
    limit = max(costs)
    while not _fits(costs, num_stages, limit):
        limit = _next_limit(costs, num_stages, limit)
    stages, start = [], 0
    for stage in range(num_stages):
        end, total = start, 0
        last_allowed = len(costs) - (num_stages - stage - 1)
        while end < last_allowed and total + costs[end] <= limit:
            total += costs[end]
            end += 1
        stages.append(range(start, end))
        start = end
    return stages


def _fits(costs: Sequence[int], num_stages: int, limit: int) -> bool:
    used, total = 1, 0
    for cost in costs:
        if total + cost > limit:
            used, total = used + 1, 0
        total += cost
    return used <= num_stages


def _next_limit(costs: Sequence[int], num_stages: int, limit: int) -> int:
    """The smallest run of blocks that is dearer than the limit."""
    sums = []
    for start in range(len(costs)):
        total = 0
        for cost in costs[start:]:
            total += cost
            if total > limit:
                sums.append(total)
                break
    return min(sums)
