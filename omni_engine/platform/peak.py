# SPDX-License-Identifier: Apache-2.0
"""Peak rates of matrix products, which a model FLOPs utilisation is a fraction of.

Dense figures (no structured sparsity). NVIDIA: the data sheets of the H100, H200, H20, A100, L40, L40S and B200, GB200
(their tensor-core figures with sparsity, halved). Ascend: the cube units alone, as torchtitan-npu has them; the total
that Huawei names is higher. Nothing is guessed: a device that is not here has no peak.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import torch

# Words that a device's name must have, bfloat16, TF32, float32, in 1e12 FLOP/s. The first row that fits is taken.
NVIDIA: tuple[tuple[str, float, float, float], ...] = (
    ("GB200", 2500, 1250, 80),
    ("B200", 2250, 1125, 75),
    ("H200 NVL", 835.5, 417.5, 60),
    ("H200", 989.4, 494.7, 66.9),
    ("H100 NVL", 835.5, 417.5, 60),
    ("H100 PCIe", 756, 378, 51),
    ("H100", 989.4, 494.7, 66.9),
    ("H800 PCIe", 756, 378, 51),
    ("H800", 989.4, 494.7, 66.9),
    ("H20", 148, 74, 44),
    ("A100", 312, 156, 19.5),
    ("A800", 312, 156, 19.5),
    ("L40S", 362, 183, 91.6),
    ("L40", 181, 90.5, 90.5),
)

# Beginnings of names, bfloat16 in 1e12 FLOP/s. In float32 the cube units have no published rate.
ASCEND: Mapping[str, float] = {
    "Ascend910B1": 373.88,
    "Ascend910B2": 353.8944,
    "Ascend910B3": 294.912,
    "Ascend910B4": 245.76,
    "Ascend910_93": 353.8944,
}


def nvidia_peak(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a GPU by its name; None where it is unknown. Float32 products use TF32 if torch is allowed to."""
    words = set(re.split(r"[^A-Za-z0-9]+", name))
    for wanted, half, tf32, single in NVIDIA:
        if words.issuperset(wanted.split()):
            if dtype in (torch.bfloat16, torch.float16):
                return half * 1e12
            if dtype == torch.float32:
                return (single if torch.get_float32_matmul_precision() == "highest" else tf32) * 1e12
    return None


def ascend_peak(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of an NPU by its name; None where it is unknown."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((peak * 1e12 for start, peak in ASCEND.items() if name.startswith(start)), None)


def measured_peak(dtype: torch.dtype, size: int = 512, seconds: float = 0.5) -> float:
    """FLOP/s of a square matrix product on the host with this process's threads: the best of as many as fit."""
    # Not random numbers: a draw would move the generator, and a resumed run would differ from the unbroken one.
    a, b = torch.ones(2, size, size, dtype=dtype)
    torch.mm(a, b)  # the first call sets up threads and kernels
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        torch.mm(a, b)
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return 2 * size**3 / best
