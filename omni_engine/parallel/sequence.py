# SPDX-License-Identifier: Apache-2.0
"""How the tokens of a stream are divided over ranks: over the context axis, and over tp under sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from omni_engine.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class TokenSharding:
    """Equal consecutive parts of a padded stream. Part `index` of `shards` is this rank's.

    The context axis is the outer one: a context rank's tokens are consecutive, and its tp ranks cut them further under
    sequence parallelism. Streams are padded to a multiple of `shards`; attention masks the padding.

    Attributes:
        context_rank, context_size: the place on the context axis alone, where attention stands.
        group: ranks of the parts, in order.
    """

    shards: int
    index: int
    context_rank: int
    context_size: int
    group: dist.ProcessGroup

    @staticmethod
    def of(groups: ParallelGroups, sequence_parallel: bool) -> TokenSharding:
        """The sharding of a layout."""
        tp = groups.tp_size if sequence_parallel else 1
        return TokenSharding(
            shards=tp * groups.cp_size,
            index=groups.cp_rank * tp + (groups.tp_rank if sequence_parallel else 0),
            context_rank=groups.cp_rank,
            context_size=groups.cp_size,
            group=groups.tp_cp if sequence_parallel else groups.cp,
        )

    def padded(self, tokens: int) -> int:
        """Tokens rounded up to a multiple of the shards."""
        return -(-tokens // self.shards) * self.shards

    def local(self, tokens: int) -> int:
        """Tokens of one part."""
        return self.padded(tokens) // self.shards

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part [S_pad / shards, ...] of x [S, ...], zeros on padding. Not differentiable across ranks: for
        inputs, which every rank holds."""
        return self._part(x, self.index, self.shards)

    def take_context(self, x: torch.Tensor) -> torch.Tensor:
        """The part [S_pad / context_size, ...] of x [S, ...] that this context rank attends with, zeros on padding."""
        return self._part(x, self.context_rank, self.context_size)

    def _part(self, x: torch.Tensor, index: int, parts: int) -> torch.Tensor:
        padding = self.padded(x.shape[0]) - x.shape[0]
        if padding:
            x = torch.cat([x, x.new_zeros(padding, *x.shape[1:])])
        length = x.shape[0] // parts
        return x.narrow(0, index * length, length)

    def gather(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """All parts [tokens, ...] of x [S_pad / shards, ...], padding dropped.

        Every rank goes on with the whole, so each has the whole gradient of it and keeps its part: no reduction.
        """
        if self.shards == 1:
            return x
        whole: torch.Tensor = gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=False, group=self.group
        )
        return whole[:tokens]

    def key_mask(self, valid: list[torch.Tensor]) -> torch.Tensor:
        """Mask of the joint tokens in the order in which the context ranks hold them: rank by rank, stream by stream.

        Args:
            valid: of each stream in order, bool [B, S].
        Returns: bool [B, sum of padded lengths], False on padding.
        """
        padded = [F.pad(mask, (0, self.padded(mask.shape[1]) - mask.shape[1])) for mask in valid]
        by_rank = [mask.unflatten(1, (self.context_size, -1)) for mask in padded]
        return torch.cat(by_rank, dim=2).flatten(1)
