# SPDX-License-Identifier: Apache-2.0
"""Run under torchrun: attention with sharded tokens, by itself.

    usp_worker.py FOLDER ULYSSESxRING ...

A rank's part of the output and of the gradient goes to FOLDER/ULYSSESxRING/CASE.RANK.safetensors.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import save_file

from omni_engine.parallel import destroy, initialize, leave_layout, usp_attention
from omni_engine.platform import get_platform
from omni_engine.platform.attention_kernels import MathKernel
from tools.bench.parity_layouts import layout

TOKENS, BATCH, HEADS, HEAD_DIM = 24, 2, 4, 8
KERNELS = {"math": MathKernel, "platform": lambda: get_platform().attention_kernel()}
MASKS = ("none", "padding", "scattered")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASES = ["-".join(case) for case in product(MASKS, KERNELS, DTYPES)]


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, keys and values [S, B, 3, H, D] of all tokens, and what the output is multiplied by [S, B, H, D]."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(TOKENS, BATCH, 3, HEADS, HEAD_DIM, generator=generator)
    qkv[:, :, :2] *= 2.0  # scores of the size of 4, so that keys differ in weight
    return qkv.to(dtype), torch.randn(TOKENS, BATCH, HEADS, HEAD_DIM, generator=generator).to(dtype)


def key_mask(kind: str) -> torch.Tensor | None:
    """bool [B, S]. `padding`: all ranks but the first have nothing of the first sample; `scattered`: as it falls."""
    if kind == "none":
        return None
    if kind == "padding":
        return torch.arange(TOKENS) < torch.tensor([[5], [TOKENS - 1]])
    return torch.rand(BATCH, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.5


def main(folder: Path, degrees: list[str]) -> None:
    """All cases of each pair of degrees."""
    for name in degrees:
        ulysses, ring = map(int, name.split("x"))
        groups = initialize(layout(ulysses_degree=ulysses, ring_degree=ring).parallel, seed=0)
        place = {"tp": 0, "cp": groups.cp_rank, "pp": 0, "dp": 0}
        (folder / name).mkdir(exist_ok=True)
        for case in CASES:
            mask, kernel, dtype = case.split("-")
            whole, cotangent = inputs(DTYPES[dtype])
            qkv = whole.chunk(groups.cp_size)[groups.cp_rank].clone().requires_grad_()
            out = usp_attention(qkv, key_mask(mask), groups, KERNELS[kernel]())
            out.backward(cotangent.chunk(groups.cp_size)[groups.cp_rank])
            assert qkv.grad is not None
            save_file(
                {"out": out.detach().contiguous(), "grad": qkv.grad.contiguous()},
                folder / name / f"{case}.{groups.rank}.safetensors",
                metadata={"figures": "{}", "place": json.dumps(place)},
            )
        leave_layout()
    destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
