# SPDX-License-Identifier: Apache-2.0
"""Three-axis rotary positions of Qwen-Image (QwenEmbedRope in diffusers, theta 10000, `scale_rope`)."""

from __future__ import annotations

from functools import lru_cache

import torch

THETA = 10000.0


def _angles(positions: torch.Tensor, dim: int) -> torch.Tensor:
    """Angles [P, dim/2] of integer positions, in the operation order of the reference so that the bits agree."""
    return torch.outer(positions, 1.0 / torch.pow(THETA, torch.arange(0, dim, 2).to(torch.float32).div(dim)))


@lru_cache(maxsize=64)
def qwen_image_frequencies(
    grid: tuple[int, int, int], text_tokens: int, axes_dims: tuple[int, int, int], device: torch.device
) -> torch.Tensor:
    """Rotation of every joint token, text first, as unit complex numbers [T + I, D/2] (complex64).

    Image rows and columns are centred on zero; text continues diagonally after the largest image position.

    Args:
        grid: (frames, height, width) of the latent in patches; I = frames * height * width.
        text_tokens: T, padded length.
        axes_dims: rotary dims of frame, height and width; they sum to the head size D.
    """
    frames, height, width = grid
    frame = torch.arange(frames)
    row = torch.arange(height) - (height - height // 2)
    column = torch.arange(width) - (width - width // 2)
    shape = (frames, height, width, -1)
    image = torch.cat(
        [
            _angles(frame, axes_dims[0])[:, None, None].expand(shape),
            _angles(row, axes_dims[1])[None, :, None].expand(shape),
            _angles(column, axes_dims[2])[None, None, :].expand(shape),
        ],
        dim=-1,
    ).flatten(0, 2)
    first = max(height // 2, width // 2)
    position = torch.arange(first, first + text_tokens)
    text = torch.cat([_angles(position, dim) for dim in axes_dims], dim=-1)
    angles = torch.cat([text, image])
    return torch.polar(torch.ones_like(angles), angles).to(device)


def apply_rotary(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of the last dim in float32.

    Args:
        x: [S, ..., D].
        frequencies: [S, D/2] complex64.
    Returns: x rotated, same shape and dtype.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    frequencies = frequencies.view(frequencies.shape[0], *(1,) * (pairs.ndim - 2), frequencies.shape[1])
    return torch.view_as_real(pairs * frequencies).flatten(-2).type_as(x)
