# SPDX-License-Identifier: Apache-2.0
"""USP attention (arXiv:2405.07719): Ulysses (all-to-all between tokens and heads) around ring attention.

Bidirectional attention does not care for the order of its tokens, so both streams of a joint attention are sharded and
a rank holds its part of each. Shapes: S tokens of this rank, B batch, H heads, D head size, u Ulysses and r ring ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from omni_engine.parallel.groups import ParallelGroups
from omni_engine.platform.attention_kernels import AttentionKernel


def usp_attention(
    qkv: torch.Tensor, key_mask: torch.Tensor | None, groups: ParallelGroups, kernel: AttentionKernel
) -> torch.Tensor:
    """Attention of this rank's tokens with the tokens of all context ranks.

    Args:
        qkv: [S, B, 3, H, D], H divisible by u.
        key_mask: bool [B, S * u * r] over all tokens, context rank by context rank; False on padding; None: no padding.
        kernel: of a ring step; without a ring torch's own attention is used.
    Returns: [S, B, H, D].
    """
    query, key, value = _all_to_all(qkv, groups.ulysses, True).permute(2, 1, 3, 0, 4)  # each [B, H/u, S u, D]
    if groups.ring_size == 1:
        mask = None if key_mask is None else key_mask[:, None, None, :]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    else:
        out = _RingAttention.apply(query, key, value, key_mask, groups.ring, kernel)
    return _all_to_all(out.permute(2, 0, 1, 3), groups.ulysses, False)


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup, to_heads: bool) -> torch.Tensor:
    if group.size() == 1:
        return x
    out: torch.Tensor = _AllToAll.apply(x, group, to_heads)
    return out


class _AllToAll(torch.autograd.Function):
    """[S, ..., H, D] of all heads to [S u, ..., H/u, D] of all tokens (`to_heads`), and back. One exchange."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, to_heads: bool) -> torch.Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _exchange(grad, ctx.group, not ctx.to_heads), None, None


def _exchange(x: torch.Tensor, group: dist.ProcessGroup, to_heads: bool) -> torch.Tensor:
    ranks = group.size()
    if to_heads:
        send = x.unflatten(-2, (ranks, -1)).movedim(-3, 0).contiguous()  # [u, S, ..., H/u, D]
    else:
        send = x.unflatten(0, (ranks, -1)).contiguous()  # [u, S, ..., H/u, D]
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return received.flatten(0, 1) if to_heads else received.movedim(0, -3).flatten(-3, -2)


class _RingAttention(torch.autograd.Function):
    """Keys and values travel once around the ring; outputs are merged by their log-sum-exps. In the backward pass their
    gradients start at the next rank, travel behind them and come home with the last hop, to the part made there."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor | None,
        group: dist.ProcessGroup,
        kernel: AttentionKernel,
    ) -> torch.Tensor:
        block = _MaskedBlock(kernel, query.shape[-1] ** -0.5, key_mask, group)
        query = query.contiguous()
        key_value = own = torch.stack([key, value])
        out = lse = torch.empty(0)
        for step in range(group.size()):
            is_last = step == group.size() - 1
            receive = None if is_last else _pass_on(key_value, group)
            part, part_lse = block.forward(query, key_value, step)
            if step == 0:
                out, lse = part, part_lse
            else:
                merged = torch.logaddexp(lse, part_lse)
                out = out * _weight(lse, merged) + part * _weight(part_lse, merged)
                lse = merged
            if receive is not None:
                key_value = receive()
        out = out.to(query.dtype)
        ctx.save_for_backward(query, own, out, lse)
        ctx.block, ctx.group = block, group
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key_value, out, lse = ctx.saved_tensors
        block, group = ctx.block, ctx.group
        grad = grad.contiguous()
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        at_home = torch.empty(0)
        travelling: Callable[[], torch.Tensor] | None = None
        for step in range(group.size()):
            receive = None if step == group.size() - 1 else _pass_on(key_value, group)
            dq, dk, dv = block.backward(grad, query, key_value, out, lse, step)
            grad_query += dq
            part = torch.stack([dk, dv]).float()
            if step == 0:
                at_home = part
            else:
                travelling = _pass_on(part if travelling is None else travelling() + part, group)
            if receive is not None:
                key_value = receive()
        assert travelling is not None
        grad_key, grad_value = (at_home + travelling()).to(query.dtype)
        return grad_query.to(query.dtype), grad_key, grad_value, None, None, None


class _MaskedBlock:
    """A kernel with the mask of the keys that are here in a given step; samples without a valid key there count for
    nothing."""

    def __init__(self, kernel: AttentionKernel, scale: float, key_mask: torch.Tensor | None, group: dist.ProcessGroup):
        self.kernel, self.scale, self.rank, self.size = kernel, scale, group.rank(), group.size()
        self.masks = self.empty = None
        if key_mask is not None:
            masks = key_mask.unflatten(1, (self.size, -1))  # [B, r, S u]
            self.empty = ~masks.any(-1)
            self.masks = masks | self.empty[..., None]  # a kernel wants at least one key

    def forward(self, query: torch.Tensor, key_value: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask, empty = self._of(step)
        out, lse = self.kernel.forward(query, key_value[0], key_value[1], self.scale, mask)
        return out, lse if empty is None else lse.masked_fill(empty[:, None, None], float("-inf"))

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key_value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        step: int,
    ) -> tuple[torch.Tensor, ...]:
        mask, empty = self._of(step)
        grads = self.kernel.backward(grad, query, key_value[0], key_value[1], out, lse, self.scale, mask)
        return grads if empty is None else tuple(g.masked_fill(empty[:, None, None, None], 0.0) for g in grads)

    def _of(self, step: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.masks is None or self.empty is None:
            return None, None
        owner = (self.rank - step) % self.size
        return self.masks[:, owner], self.empty[:, owner]


def _weight(part: torch.Tensor, merged: torch.Tensor) -> torch.Tensor:
    """exp(part - merged) [B, H, S, 1]; 0 where the part is empty, even if nothing has been merged yet."""
    return torch.exp(part - merged).nan_to_num(0.0)[..., None]


def _pass_on(tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Send to the next rank of the ring and receive from the one before; the result waits for what comes."""
    ranks, rank = dist.get_process_group_ranks(group), group.rank()
    received = torch.empty_like(tensor)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, ranks[(rank + 1) % len(ranks)], group),
            dist.P2POp(dist.irecv, received, ranks[(rank - 1) % len(ranks)], group),
        ]
    )

    def wait(_sent: torch.Tensor = tensor) -> torch.Tensor:  # kept until it has left
        for request in requests:
            request.wait()
        return received

    return wait
