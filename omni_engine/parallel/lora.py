# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of sharded linear layers: y = W x + (alpha / r) B A x, exact under every layout.

A follows the input of its layer and B the output, so the only thing that is exchanged is the small product A x:

    column-parallel   A whole on every rank, B sharded as W;  under sequence parallelism A x is gathered
    row-parallel      A sharded as W, B whole on every rank;  A x is summed, or summed and scattered under it
    replicated        both whole

Shape legend: S tokens, B batch, r rank, n adapters of one fused layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.nn.functional as F
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig


class Adaptable(Protocol):
    """What a linear layer offers to an adapter.

    Attributes:
        weight: [out, in] of this rank.
        adapter: what is added to the output: forward(x) ends with `adapter(x, y)`, x as the layer received it.
        on_tokens: whether the input is tokens, which sequence parallelism divides over the tensor-parallel ranks, or
            conditioning rows, whole on each of them.
    """

    weight: torch.nn.Parameter
    adapter: LoraAdapter | None
    on_tokens: bool


class LoraAdapter(torch.nn.Module):
    """Adapters of one linear layer, or of some of the sources that it is fused from.

    Attributes:
        down: the A of the adapted sources below each other, [n r, in].
        up: their B below each other, [n out, r].
        enabled: whether the product is added; without it the layer is that of the frozen model.
    """

    def __init__(
        self,
        linear: Adaptable,
        shard_dim: int | None,
        places: Sequence[int],
        sources: int,
        rank: int,
        scale: float,
        config: TransformerConfig,
    ):
        """Zeros, until they are initialised or loaded.

        Args:
            shard_dim: dim of the layer's weight that is divided over the tensor-parallel axis; None: none is.
            places: the adapted ones of the `sources` equal parts of the output.
            scale: alpha / r.
        """
        super().__init__()
        self.shard_dim, self.places, self.sources, self.scale = shard_dim, tuple(places), sources, scale
        self.group = get_tensor_model_parallel_group()
        self.sequence_parallel = config.sequence_parallel and linear.on_tokens
        self.enabled = True
        features_out, features_in = linear.weight.shape
        self.down = torch.nn.Parameter(linear.weight.new_zeros(len(places) * rank, features_in))
        self.up = torch.nn.Parameter(linear.weight.new_zeros(len(places) * (features_out // sources), rank))
        for parameter, dim in ((self.down, 1), (self.up, 0)):
            if shard_dim == dim:
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
            else:
                # A whole matrix that has seen a part of the tokens: Megatron sums its gradient over the axis.
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y with the adapters' part added.

        Args:
            x: [S, B, in] as the layer received it, tokens and features sharded as there.
            y: [S, B, out] that the layer gave, bias included.
        Returns: shape and dtype of y; y itself, to the bit, where every B is zero.
        """
        if not self.enabled:
            return y
        low = self._exchanged(F.linear(x, self.down))
        parts = list(y.chunk(self.sources, dim=-1))
        adapters = zip(self.places, low.chunk(len(self.places), -1), self.up.chunk(len(self.places)), strict=True)
        for place, inner, up in adapters:
            part = parts[place]
            # One operation, which rounds once to a 16-bit sum.
            added = torch.addmm(part.flatten(0, -2), inner.flatten(0, -2), up.t(), alpha=self.scale)
            parts[place] = added.view(part.shape)
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def _exchanged(self, low: torch.Tensor) -> torch.Tensor:
        """A x [S, B, n r] in the form that B is applied to."""
        if self.group.size() == 1 or self.shard_dim is None:
            return low
        # Ours: a column's B gives each rank a part of the output, so the gradient of A x is a sum over the ranks.
        if self.shard_dim == 0:
            if self.sequence_parallel:
                return gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self.group)
            return copy_to_tensor_model_parallel_region(low, group=self.group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        return reduce_from_tensor_model_parallel_region(low, group=self.group)


@contextmanager
def without_adapters(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Run the block with the frozen weights alone: exact, and no weight is copied."""
    adapters = [one for module in modules for one in module.modules() if isinstance(one, LoraAdapter)]
    before = [adapter.enabled for adapter in adapters]
    try:
        for adapter in adapters:
            adapter.enabled = False
        yield
    finally:
        for adapter, enabled in zip(adapters, before, strict=True):
            adapter.enabled = enabled
