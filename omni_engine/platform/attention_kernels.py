# SPDX-License-Identifier: Apache-2.0
"""Attention of one block of queries with one block of keys, as ring attention needs it.

A kernel gives the block's output with the log-sum-exp of its scores, from which blocks are merged, and takes the
merged output and log-sum-exp in its backward pass (FlashAttention, arXiv:2205.14135, section 3.2). Shapes: B batch, H
heads, S queries, K keys, D head size. Tensors are [B, H, S or K, D]; a mask is bool [B, K], False on keys that count
for nothing, with at least one True a sample.
"""

from __future__ import annotations

import importlib
from typing import Protocol, TypeAlias

import torch

Grads: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"


class AttentionKernel(Protocol):
    """One block of attention, without dropout and without causality."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, H, S, D] and log-sum-exp of the scaled scores [B, H, S], both float32."""
        ...

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None,
    ) -> Grads:
        """Gradients of q, k and v from this block, given output (in q's dtype) and log-sum-exp of all blocks."""
        ...


class MathKernel:
    """Plain matrix products in float32, S x K scores in memory: for any device, and the oracle of the others."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self._scores(q, k, scale, mask)
        lse = torch.logsumexp(scores, dim=-1)
        return torch.exp(scores - lse[..., None]) @ v.float(), lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None,
    ) -> Grads:
        grad = grad.float()
        p = torch.exp(self._scores(q, k, scale, mask) - lse[..., None])
        along = (grad * out.float()).sum(-1, keepdim=True)
        ds = p * (grad @ v.float().mT - along) * scale
        return ds @ k.float(), ds.mT @ q.float(), p.mT @ grad

    @staticmethod
    def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
        scores = (q.float() @ k.float().mT) * scale
        return scores if mask is None else scores.masked_fill(~mask[:, None, None, :], float("-inf"))


class CpuFlashKernel:
    """Torch's flash attention for the CPU."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=_bias(q, k, mask), scale=scale
        )
        return out.float(), lse.float()

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None,
    ) -> Grads:
        grads: Grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.to(q.dtype), q, k, v, out, lse, 0.0, False, attn_mask=_bias(q, k, mask), scale=scale
        )
        return grads


class CudaFlashKernel:
    """Torch's attention on NVIDIA GPUs: flash attention, or memory-efficient attention where keys are masked or the
    dtype is float32. Written from the operators' schemas; not run on a device."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._flash(q, mask):
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
        else:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, _bias(q, k, mask, aligned=True), True, 0.0, False, scale=scale
            )
        # The efficient kernel pads the queries of its log-sum-exp.
        return out.float(), lse[..., : q.shape[2]].float()

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None,
    ) -> Grads:
        # Without dropout the random state is not read.
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        grad, lse = grad.to(q.dtype), lse.contiguous()
        if self._flash(q, mask):
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, False, seed, seed, scale=scale
            )
            return dq, dk, dv
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
        bias, wanted = _bias(q, k, mask, aligned=True), (True, True, True, False)
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, bias, out, lse, seed, seed, 0.0, wanted, False, scale=scale
        )
        return dq, dk, dv

    @staticmethod
    def _flash(q: torch.Tensor, mask: torch.Tensor | None) -> bool:
        return mask is None and q.dtype in (torch.float16, torch.bfloat16)


class NpuFusionKernel:
    """Ascend's fused attention. It keeps the maximum and the sum of the scores instead of their log-sum-exp, and
    (maximum = log-sum-exp, sum = 1) says the same. Written from torch_npu's reference; not run on a device."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        npu = importlib.import_module("torch_npu")
        out, largest, total, *_ = npu.npu_fusion_attention(
            q, k, v, q.shape[1], "BNSD", atten_mask=self._hidden(q, mask), scale=scale
        )
        return out.float(), (largest + total.log())[..., 0]

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None,
    ) -> Grads:
        npu = importlib.import_module("torch_npu")
        largest = lse[..., None].expand(*lse.shape, 8).contiguous()
        dq, dk, dv, *_ = npu.npu_fusion_attention_grad(
            q,
            k,
            v,
            grad.to(q.dtype),
            q.shape[1],
            "BNSD",
            atten_mask=self._hidden(q, mask),
            softmax_max=largest,
            softmax_sum=torch.ones_like(largest),
            attention_in=out,
            scale_value=scale,
        )
        return dq, dk, dv

    @staticmethod
    def _hidden(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        """[B, 1, S, K], True on what is left out."""
        return None if mask is None else ~mask[:, None, None, :].expand(-1, 1, q.shape[2], -1)


def _bias(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, aligned: bool = False) -> torch.Tensor | None:
    """The mask as an addend [B, H or 1, S, K]; `aligned`: rows begin at multiples of 16 elements, as CUDA wants it."""
    if mask is None:
        return None
    keys = k.shape[2]
    room = -(-keys // 16) * 16 if aligned else keys
    bias = torch.zeros(mask.shape[0], room, dtype=q.dtype, device=q.device)
    bias[:, :keys].masked_fill_(~mask, float("-inf"))
    heads = q.shape[1] if aligned else 1
    return bias[:, None, None, :].expand(-1, heads, q.shape[2], -1)[..., :keys]
