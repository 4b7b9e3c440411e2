# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks that must hold a weight alike do so, to the bit."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from omni_engine.models.policy import Policy
from omni_engine.parallel.collectives import any_rank

_PART = 1 << 20
"""Elements that are widened to 64 bits at a time."""
_SHOWN = 4
"""Weights that a message names."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over i of bits_i (2 i + 1) modulo 2^64, where bits_i is the bit pattern of element i read as an integer.

    Exact, and it moves whenever one element changes or two unequal ones change places: an odd number times a number
    between 0 and 2^32 is not 0 modulo 2^64, nor is 2 |i - j| times one as long as |i - j| < 2^31. Changes of more
    elements could cancel, as in any sum.

    With i = r m + c, the weight 2 i + 1 is (2 r m + 1) + 2 c, so sums over rows and over columns are enough.

    Args:
        tensor: of elements of at most 32 bits, on any device.
    Returns: int64, a single number on the device of the tensor.
    """
    flat = tensor.detach().contiguous().view(_BITS[tensor.element_size()])
    rows = flat.view(-1, flat.shape[-1] if flat.ndim else 1)
    count, width = rows.shape
    by_row = torch.empty(count, dtype=torch.int64, device=rows.device)
    by_column = torch.zeros(width, dtype=torch.int64, device=rows.device)
    step = max(1, _PART // width)
    for start in range(0, count, step):
        part = rows[start : start + step].long()
        by_row[start : start + step] = part.sum(1)
        by_column += part.sum(0)
    row_weights = torch.arange(1, 2 * count * width, 2 * width, device=rows.device)
    column_weights = torch.arange(0, 2 * width, 2, device=rows.device)
    return (by_row * row_weights).sum() + (by_column * column_weights).sum()


class ReplicaCheck:
    """Compares every weight over the data and context axes, and over the tensor axis where it is held whole.

    It is due after the first step of a run, where what was put together wrongly shows, and after every `interval`-th.
    """

    def __init__(self, policy: Policy, interval: int = 1):
        self.policy, self.interval = policy, interval
        self._is_first = True

    def is_due(self, version: int) -> bool:
        """Whether to compare now, after the step that made this version of the weights; to be asked once a step."""
        due = self._is_first or version % self.interval == 0
        self._is_first = False
        return due

    def difference(self) -> str | None:
        """What differs, where and on which ranks, for people; None if all is alike. A collective of all ranks."""
        groups = self.policy.groups
        if groups.dp_cp.size() == groups.tp_size == 1:
            return None
        names, whole, sums = self._checksums()
        # The complement turns the order around, so that one reduction finds the smallest and the largest.
        limits = torch.stack([sums, ~sums])
        dist.all_reduce(limits, op=dist.ReduceOp.MIN, group=groups.dp_cp)
        if groups.tp_size > 1 and bool(whole.any()):
            over_tp = limits[:, whole]
            dist.all_reduce(over_tp, op=dist.ReduceOp.MIN, group=groups.tp)
            limits[:, whole] = over_tp
        differs = limits[0] != ~limits[1]
        (found,) = any_rank(bool(differs.any()))
        return self._describe(names, whole, sums, differs) if found else None

    def _checksums(self) -> tuple[list[str], torch.Tensor, torch.Tensor]:
        """Hugging Face names of this rank's weights; bool, whether all tensor-parallel ranks hold it; int64 sums."""
        parameters = self.policy.parameters()
        names, whole, sums = [], [], []
        for path, entry in self.policy.mapping.of(parameters).items():
            for name, piece in zip(entry.sources, entry.split(parameters[path]), strict=True):
                names.append(name)
                whole.append(entry.shard_dim is None)
                sums.append(checksum(piece))
        stacked = torch.stack(sums)
        return names, torch.tensor(whole, device=stacked.device), stacked

    def _describe(self, names: list[str], whole: torch.Tensor, sums: torch.Tensor, differs: torch.Tensor) -> str:
        groups = self.policy.groups
        mine = [
            (name, -1 if held_whole else groups.tp_rank, total)
            for name, held_whole, total, bad in zip(names, whole.tolist(), sums.tolist(), differs.tolist(), strict=True)
            if bad
        ]
        everyone: list[Any] = [None] * groups.world_size
        dist.all_gather_object(everyone, mine)
        held: dict[tuple[str, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, theirs in enumerate(everyone):
            for name, shard, total in theirs:
                held[name, shard][total].append(rank)
        shown = [f"{name} ({_sides(list(by_sum.values()))})" for (name, _), by_sum in list(held.items())[:_SHOWN]]
        more = f" and {len(held) - _SHOWN} more" if len(held) > _SHOWN else ""
        return f"ranks that must hold the same weights do not: {', '.join(shown)}{more}"


def _sides(ranks: list[list[int]]) -> str:
    """Who differs from whom, the smaller parties first: `rank 1 differs from ranks 0, 2, 3`."""
    parties = [
        f"{'rank' if len(party) == 1 else 'ranks'} {', '.join(map(str, party))}"
        for party in sorted(ranks, key=lambda party: (len(party), -party[0]))
    ]
    verb = "differs" if len(min(ranks, key=len)) == 1 else "differ"
    return f" {verb} from ".join(parties)
