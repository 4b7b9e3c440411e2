# SPDX-License-Identifier: Apache-2.0
"""Invariant: a kernel run on blocks of keys, its outputs merged by their log-sum-exps and its backward pass given the
merged output and log-sum-exp, is the attention with all keys, forward and backward, with and without masked keys.

The oracle is torch's attention in float64 on the same numbers. Tolerances, of a tensor's norm: 5e-6 in float32 (5e-7
was measured), 2e-2 in bfloat16 (6e-3), whose steps are 2^-8 = 4e-3.

The kernels of other devices cannot run here. The calls of the CUDA kernel go to torch's own operators on tensors
without storage, which holds their arguments, shapes and dtypes against the operators' schemas; its numbers, strides and
alignment are not covered. The NPU kernel is run against a stand-in for `torch_npu`, written from the signatures and the
softmax convention of its documentation, which holds our use of them; whether the device keeps to them is not covered.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from omni_engine.platform.attention_kernels import (
    AttentionKernel,
    CpuFlashKernel,
    CudaFlashKernel,
    MathKernel,
    NpuFusionKernel,
)

pytestmark = pytest.mark.fast

B, H, S, D = 2, 3, 5, 8
BLOCKS = (4, 7, 1)
"""Keys of each block."""
KEYS = sum(BLOCKS)
SCALE = 0.5
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2e-2}


def numbers(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, S, D), (B, H, KEYS, D), (B, H, KEYS, D), (B, H, S, D))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def key_mask() -> torch.Tensor:
    """bool [B, KEYS] with a key left in every block, as the kernels want it: in one sample all are, in the other the
    first of each."""
    mask = torch.ones(B, KEYS, dtype=torch.bool)
    mask[1] = False
    mask[1, [0, 4, 6, 11]] = True
    return mask


def oracle(dtype: torch.dtype, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Output, log-sum-exp, and gradients of q, k and v."""
    q, k, v, grad = (x.double() for x in numbers(dtype))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    keys = None if mask is None else mask[:, None, None]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=keys, scale=SCALE)
    scores = q @ k.mT * SCALE
    lse = scores.masked_fill(~keys, float("-inf")).logsumexp(-1) if keys is not None else scores.logsumexp(-1)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)]


def by_blocks(kernel: AttentionKernel, dtype: torch.dtype, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """The same from one block of keys after the other."""
    q, k, v, grad = numbers(dtype)
    keys, values = k.split(BLOCKS, 2), v.split(BLOCKS, 2)
    masks = [None] * len(BLOCKS) if mask is None else mask.split(BLOCKS, 1)
    blocks = list(zip(keys, values, masks, strict=True))
    parts = [kernel.forward(q, block_k, block_v, SCALE, block_mask) for block_k, block_v, block_mask in blocks]
    for out, lse in parts:
        assert out.dtype == lse.dtype == torch.float32 and out.shape == q.shape and lse.shape == q.shape[:-1]
    lse = torch.stack([part for _, part in parts]).logsumexp(0)
    out = sum(out * torch.exp(part - lse)[..., None] for out, part in parts).to(dtype)
    grads = [
        kernel.backward(grad, q, block_k, block_v, out, lse, SCALE, block_mask)
        for block_k, block_v, block_mask in blocks
    ]
    dq = torch.stack([dq.float() for dq, _, _ in grads]).sum(0)
    return [out, lse, dq, *(torch.cat([of_block[place] for of_block in grads], 2) for place in (1, 2))]


def check(kernel: AttentionKernel, dtype: torch.dtype, mask: torch.Tensor | None) -> None:
    names = ("out", "lse", "dq", "dk", "dv")
    for name, ours, theirs in zip(names, by_blocks(kernel, dtype, mask), oracle(dtype, mask), strict=True):
        error = float((ours - theirs).norm() / theirs.norm())
        assert error < TOLERANCES[dtype], (name, error)
        if mask is not None and name in ("dk", "dv"):
            assert not ours.transpose(1, 2)[~mask].any(), f"{name} of a masked key"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kernel", [MathKernel, CpuFlashKernel])
def test_blocks_of_keys_make_the_whole_attention(
    kernel: type[AttentionKernel], dtype: torch.dtype, masked: bool
) -> None:
    check(kernel(), dtype, key_mask() if masked else None)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_cuda_calls_fit_the_schemas_of_torchs_operators(dtype: torch.dtype, masked: bool) -> None:
    """Sixteen bits without a mask are flash attention, everything else memory-efficient attention."""
    q, k, v, grad = (x.to("meta") for x in numbers(dtype))
    mask = key_mask().to("meta") if masked else None
    kernel = CudaFlashKernel()
    out, lse = kernel.forward(q, k, v, SCALE, mask)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    assert out.dtype == lse.dtype == torch.float32
    grads = kernel.backward(grad, q, k, v, out.to(dtype), lse, SCALE, mask)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, dtype) for x in (q, k, v)]


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("_scaled_dot_product_flash_attention", "query key value dropout_p is_causal return_debug_mask scale"),
        (
            "_scaled_dot_product_flash_attention_backward",
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
            "philox_offset scale",
        ),
        (
            "_scaled_dot_product_efficient_attention",
            "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
        ),
        (
            "_scaled_dot_product_efficient_attention_backward",
            "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask "
            "is_causal scale",
        ),
    ],
)
def test_the_operators_of_the_cuda_kernel_take_what_it_gives(operator: str, arguments: str) -> None:
    """In this order; a torch that changes a signature is noticed without a GPU."""
    schema = getattr(torch.ops.aten, operator).default._schema
    assert [argument.name for argument in schema.arguments] == arguments.split()


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """As documented: True in the mask leaves a key out; maximum and sum of the softmax are float32 [B, N, S, 8], eight
    times the same number."""
    assert input_layout == "BNSD" and head_num == query.shape[1]
    scores = npu_scores(query, key, atten_mask, scale)
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights / total) @ value.float()
    return out.to(query.dtype), largest.expand(-1, -1, -1, 8), total.expand(-1, -1, -1, 8), torch.empty(0), 0, 0, 0


def npu_fusion_attention_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: torch.Tensor | None = None,
    softmax_max: torch.Tensor,
    softmax_sum: torch.Tensor,
    attention_in: torch.Tensor,
    scale_value: float = 1.0,
) -> tuple[torch.Tensor, ...]:
    """As documented: the softmax is made again from its maximum and sum, and `attention_in` is its output."""
    assert input_layout == "BNSD" and head_num == query.shape[1]
    assert softmax_max.shape == softmax_sum.shape == (*query.shape[:-1], 8)
    assert softmax_max.dtype == softmax_sum.dtype == torch.float32
    assert dy.dtype == attention_in.dtype == query.dtype
    scores = npu_scores(query, key, atten_mask, scale_value)
    weights = (scores - softmax_max[..., :1]).exp() / softmax_sum[..., :1]
    along = (dy.float() * attention_in.float()).sum(-1, keepdim=True)
    of_scores = weights * (dy.float() @ value.float().mT - along) * scale_value
    grads = (of_scores @ key.float(), of_scores.mT @ query.float(), weights.mT @ dy.float())
    return *(x.to(query.dtype) for x in grads), torch.empty(0)


def npu_scores(query: torch.Tensor, key: torch.Tensor, hidden: torch.Tensor | None, scale: float) -> torch.Tensor:
    scores = query.float() @ key.float().mT * scale
    if hidden is None:
        return scores
    assert hidden.dtype == torch.bool and hidden.shape == (len(query), 1, query.shape[2], key.shape[2])
    return scores.masked_fill(hidden, float("-inf"))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_npu_calls_mean_the_whole_attention_by_the_documented_conventions(
    dtype: torch.dtype, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = SimpleNamespace(
        npu_fusion_attention=npu_fusion_attention, npu_fusion_attention_grad=npu_fusion_attention_grad
    )
    monkeypatch.setitem(sys.modules, "torch_npu", stand_in)
    check(NpuFusionKernel(), dtype, key_mask() if masked else None)
