# SPDX-License-Identifier: Apache-2.0
"""Selective recomputation: what is cheap to make is made again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Make = Callable[..., torch.Tensor]


def consume(
    consumer: Callable[[torch.Tensor], torch.Tensor], make: Make, *inputs: torch.Tensor, remake: bool
) -> torch.Tensor:
    """consumer(make(*inputs)).

    With `remake`, neither what `make` returns nor what lies between is kept for the backward pass, only its inputs, and
    `make` runs once more there. It must be deterministic, element-wise or nearly so, and its inputs must not be changed
    in place afterwards. The numbers are the same bit for bit.
    """
    if not remake or not torch.is_grad_enabled():
        return consumer(make(*inputs))
    recipe = _Recipe(make, inputs)
    made: torch.Tensor = _Made.apply(recipe, *inputs)
    storage = made.untyped_storage().data_ptr()

    def pack(kept: torch.Tensor) -> Any:
        # The consumer may keep a view of what was made: it is recognised by its memory, which is alive here.
        if kept.untyped_storage().data_ptr() != storage:
            return kept
        return recipe, kept.size(), kept.stride(), kept.storage_offset()

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        source, size, stride, offset = packed
        remade: torch.Tensor = source.made().detach()
        return remade.as_strided(size, stride, offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return consumer(made)


class _Recipe:
    """How to make a tensor again. Its consumer's backward pass asks first and its own then uses the same copy."""

    def __init__(self, make: Make, inputs: tuple[torch.Tensor, ...]):
        self.make = make
        # Leaves of a graph of their own, on the same memory.
        self.inputs: tuple[torch.Tensor, ...] = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
        self.again: torch.Tensor | None = None
        self.is_used = False

    def made(self) -> torch.Tensor:
        if self.is_used:
            raise RuntimeError("selective recomputation runs one backward pass: what it keeps is freed on the way")
        if self.again is None:
            with torch.enable_grad():
                self.again = self.make(*self.inputs)
        return self.again

    def gradients(self, grad: torch.Tensor) -> list[torch.Tensor | None]:
        # Let go of everything at once: the graph that holds this recipe lives to the end of the backward pass.
        made, inputs = self.made(), self.inputs
        self.again, self.inputs, self.is_used = None, (), True
        found = iter(torch.autograd.grad(made, [x for x in inputs if x.requires_grad], grad))
        return [next(found) if x.requires_grad else None for x in inputs]


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recipe: _Recipe, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.recipe = recipe
        return recipe.make(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.recipe.gradients(grad)
