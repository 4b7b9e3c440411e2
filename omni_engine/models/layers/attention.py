# SPDX-License-Identifier: Apache-2.0
"""Joint attention over the concatenated streams: heads sharded over the tensor-parallel axis, tokens over the context
axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from omni_engine.parallel import ParallelGroups, usp_attention
from omni_engine.platform.attention_kernels import AttentionKernel


class QKNorm(torch.nn.Module):
    """Weights of the RMS norm of a stream's query and key heads.

    The names end in `q_layernorm` and `k_layernorm`: Megatron's `finalize_model_grads` sums their gradients over the
    tensor-parallel axis by that name, since each rank has seen its own heads only.
    """

    def __init__(self, head_dim: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.q_layernorm = torch.nn.Parameter(torch.empty(head_dim, dtype=dtype, device=device))
        self.k_layernorm = torch.nn.Parameter(torch.empty(head_dim, dtype=dtype, device=device))

    def forward(self, tokens: int) -> torch.Tensor:
        """The two weights for each token of a stream, [tokens, 1, 2, 1, D]."""
        weight = torch.stack([self.q_layernorm, self.k_layernorm])[None, None, :, None]
        return weight.expand(tokens, -1, -1, -1, -1)


class _NormalizeHeads(torch.autograd.Function):
    """RMS norm that keeps its input and one number a head for the backward pass, and makes the normed value again.

    With n = x / rms(x): d x = (g w - n mean(g w n)) / rms(x), d w = sum(g n) over samples and heads. In float32.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, inverse_rms)
        return (wide * inverse_rms).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        normed = x.float() * inverse_rms
        grad_normed = grad.float() * weight.float()
        along = (grad_normed * normed).mean(-1, keepdim=True)
        grad_weight = (grad.float() * normed).sum((1, 3), keepdim=True)
        grad_x = grad_normed.addcmul_(normed, along, value=-1.0).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def normalize_heads(qk: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of every head. qk [S, B, 2, H, D], weight [S, 1, 2, 1, D] -> shape and dtype of qk."""
    out: torch.Tensor = _NormalizeHeads.apply(qk, weight, eps)
    return out


def joint_attention(
    qk: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    groups: ParallelGroups,
    kernel: AttentionKernel,
) -> torch.Tensor:
    """Bidirectional attention over all joint tokens of all context ranks.

    Args:
        qk: [S, B, 2, H, D], queries first, of this context rank's tokens.
        value: [S, B, H, D].
        key_mask: [B, S * cp] bool, context rank by context rank, False on padding that no token may attend to; None
            when there is no padding.
        kernel: of a step of ring attention.
    Returns: [S, B, H * D].
    """
    if groups.cp_size > 1:
        return usp_attention(torch.cat([qk, value[:, :, None]], dim=2), key_mask, groups, kernel).flatten(2)
    query, key = qk.permute(2, 1, 3, 0, 4)  # each [B, H, S, D]
    mask = None if key_mask is None else key_mask[:, None, None, :]
    out = F.scaled_dot_product_attention(query, key, value.permute(1, 2, 0, 3), attn_mask=mask)
    return out.permute(2, 0, 1, 3).flatten(2)
