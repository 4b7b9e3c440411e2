# SPDX-License-Identifier: Apache-2.0
"""Invariant: blocks of keys attended to one by one, merged by their log-sum-exps, are attention over all keys, forward
and backward, masked or not, with every kernel that runs on a CPU.

Tolerance: float32 1e-5 of a tensor's norm (another order of sums), bfloat16 2e-2 (8 bits of mantissa).
Not covered: the CUDA and NPU kernels, of which only the operators' names and arguments can be checked here.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from omni_engine.platform.attention_kernels import AttentionKernel, CpuFlashKernel, MathKernel

pytestmark = pytest.mark.fast
BATCH, HEADS, QUERIES, HEAD_SIZE = 2, 3, 7, 16
BLOCKS = (5, 4, 5)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
KERNELS: dict[str, AttentionKernel] = {"math": MathKernel(), "flash": CpuFlashKernel()}


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    sizes = (QUERIES, sum(BLOCKS), sum(BLOCKS), QUERIES)
    return tuple(torch.randn(BATCH, HEADS, size, HEAD_SIZE, generator=generator).to(dtype) for size in sizes)


def padding() -> torch.Tensor:
    """bool [B, K]; every block has a key of every sample."""
    mask = torch.ones(BATCH, sum(BLOCKS), dtype=torch.bool)
    mask[0, 2:5] = mask[1, -2:] = mask[1, 6] = False
    return mask


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_merged_blocks_are_attention_over_all_keys(name: str, dtype: torch.dtype, masked: bool) -> None:
    kernel, scale = KERNELS[name], HEAD_SIZE**-0.5
    q, k, v, grad = inputs(dtype)
    mask = padding() if masked else None
    wide = [x.float().requires_grad_() for x in (q, k, v)]
    bias = None if mask is None else mask[:, None, None, :]
    expected = F.scaled_dot_product_attention(*wide, attn_mask=bias)
    expected_grads = torch.autograd.grad(expected, wide, grad.float())

    masks = [None] * len(BLOCKS) if mask is None else list(mask.split(BLOCKS, 1))
    parts = list(zip(k.split(BLOCKS, 2), v.split(BLOCKS, 2), masks, strict=True))
    done = [kernel.forward(q, key, value, scale, one) for key, value, one in parts]
    lse = torch.stack([part[1] for part in done]).logsumexp(0)
    out = sum((part * (part_lse - lse).exp()[..., None] for part, part_lse in done), torch.zeros(()))
    assert lse.dtype == out.dtype == torch.float32
    assert error(out, expected) < TOLERANCE[dtype]

    merged = out.to(dtype)
    grads = [kernel.backward(grad, q, key, value, merged, lse, scale, one) for key, value, one in parts]
    found = [sum(one[0].float() for one in grads), *(torch.cat([one[i] for one in grads], 2) for i in (1, 2))]
    for ours, theirs in zip(found, expected_grads, strict=True):
        assert error(torch.as_tensor(ours), theirs) < TOLERANCE[dtype]


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
