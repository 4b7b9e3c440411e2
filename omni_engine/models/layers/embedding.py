# SPDX-License-Identifier: Apache-2.0
"""Embedding of the model's time."""

from __future__ import annotations

import math

import torch


def sinusoidal_embedding(time: torch.Tensor, channels: int = 256, scale: float = 1000.0) -> torch.Tensor:
    """[cos, sin] of scaled time, as diffusers' `Timesteps(channels, flip_sin_to_cos=True, downscale_freq_shift=0)`.

    Args:
        time: [B] float32, in [0, 1]. Never bf16: 1000 * time must keep its fraction.
    Returns: [B, channels] float32.
    Raises:
        ValueError: time is not float32.
    """
    if time.dtype != torch.float32:
        raise ValueError(f"the model's time is {time.dtype}; it stays float32 up to the sinusoid")
    half = channels // 2
    exponent = -math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=time.device) / half
    angles = scale * (time[:, None] * torch.exp(exponent)[None])
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)
