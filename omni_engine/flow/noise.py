# SPDX-License-Identifier: Apache-2.0
"""Counter-based Gaussian noise: a function of (seed, sample, step, stream, element) and of nothing else.

So a sample meets the same noise under every layout, batch and worker count, and no two samples share it.
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
SAMPLE_ID_BITS, STEP_BITS, STREAM_BITS = 44, 16, 4


class Stream(IntEnum):
    """What the random numbers are for; each has keys of its own."""

    INITIAL_LATENT = 0
    STEP_NOISE = 1
    WINDOW = 2
    ADAPTER = 3


INITIAL_LATENT = Stream.INITIAL_LATENT
STEP_NOISE = Stream.STEP_NOISE


def mix64(value: int) -> int:
    """The splitmix64 finaliser on [0, 2^64): a bijection, so distinct inputs never collide."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def stream_key(seed: int, sample_id: int, step: int, stream: int) -> int:
    """The 64-bit Philox key. Under one seed the keys of distinct (sample_id, step, stream) are distinct, by bijection.

    Raises ValueError outside 0 <= seed < 2^64, sample_id < 2^44, step < 2^16, stream < 16.
    """
    ranges = ((seed, 64), (sample_id, SAMPLE_ID_BITS), (step, STEP_BITS), (stream, STREAM_BITS))
    if any(not 0 <= value < 1 << bits for value, bits in ranges):
        raise ValueError(
            f"noise key out of range: seed={seed} (64 bits), sample_id={sample_id} ({SAMPLE_ID_BITS} bits), "
            f"step={step} ({STEP_BITS} bits), stream={stream} ({STREAM_BITS} bits), all at least 0"
        )
    return mix64(mix64(seed) ^ (((sample_id << STEP_BITS | step) << STREAM_BITS) | stream))


def philox_normal(seed: int, sample_ids: Tensor, step: int, stream: int, num_elements: int) -> Tensor:
    """Standard normals, float32 [B, num_elements], on the device of `sample_ids` (int64 [B], global sample ids).

    Element j of a sample depends on (seed, id, step, stream, j) only: not on the batch, nor on num_elements.
    Philox4x32-10 (Salmon et al., SC11) with counter j // 4, then Box-Muller on the pairs (0, 1) and (2, 3) of a block,
    the formula of the fused kernels. Raises ValueError for a key out of range, TypeError for ids that are not int64.
    """
    if sample_ids.dtype != torch.int64 or sample_ids.dim() != 1:
        raise TypeError(f"sample_ids must be int64 [B], got {sample_ids.dtype} {list(sample_ids.shape)}")
    keys = [stream_key(seed, sample_id, step, stream) for sample_id in sample_ids.tolist()]
    device = sample_ids.device
    low = torch.tensor([key & MASK32 for key in keys], dtype=torch.int64, device=device).unsqueeze(1)  # [B, 1]
    high = torch.tensor([key >> 32 for key in keys], dtype=torch.int64, device=device).unsqueeze(1)
    counter = torch.arange((num_elements + 3) // 4, dtype=torch.int64, device=device).expand(len(keys), -1)
    zero = torch.zeros_like(counter)
    words = philox4x32((counter & MASK32, counter >> 32, zero, zero), (low, high))
    pairs = (*_box_muller(words[0], words[1]), *_box_muller(words[2], words[3]))
    return torch.stack(pairs, dim=-1).flatten(1)[:, :num_elements].contiguous()


Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds of Philox4x32. All words are int64 tensors with values in [0, 2^32); shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply32(c0, 0xD2511F53)
        high1, low1 = _multiply32(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1.bitwise_xor_(c1).bitwise_xor_(k0), low1, high0.bitwise_xor_(c3).bitwise_xor_(k1), low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def _multiply32(word: Tensor, odd: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of word * odd. Half of the odd factor first: the whole product would overflow int64."""
    half = word * (odd >> 1)  # < 2^63, and word * odd = 2 half + word
    low = (half & 0x7FFFFFFF).bitwise_left_shift_(1).add_(word)  # < 2^33: low word and carry
    high = half.bitwise_right_shift_(31).add_(low >> 32)
    return high, low.bitwise_and_(MASK32)


def _box_muller(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent float32 normals from two words.

    log, sqrt, sin and cos run in float64 and are rounded to float32 one by one, which makes each the correctly rounded
    one: the float32 functions of maths libraries differ in the last bit (torch's sqrt too, which may be MKL's), even
    with the place in a batch, and a value must depend on neither.
    """
    uniform = (first.float() * 2.0**-32 + 2.0**-33).clamp_(max=0.99999994)  # in (0, 1)
    angle = (second.float() * 2.0**-32) * (2.0 * math.pi)
    radius = (uniform.double().log_().float() * -2.0).double().sqrt_().float()
    angle = angle.double()
    return radius * angle.cos().float(), radius * angle.sin_().float()
