# SPDX-License-Identifier: Apache-2.0
"""The Gaussian step in plain differentiable torch: the op itself, and the oracle of the fused kernels that replace it.

Numerics, which a fused kernel keeps: elements in float32; a sample's sum and everything after it in float64, in an
order that depends on neither batch, threads nor device; one rounding of a gradient to its input's dtype.
Shapes: B samples, I image tokens, C packed channels; coefficients are rows a, b, s, w, c, k of `coefficient_table`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gaussian_step(x: Tensor, v: Tensor, noise: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """One denoising step: x_next = a x + b v + s noise, and the log-prob of the value returned.

    x, noise: float32 [B, I, C]. v: [B, I, C], float32 or 16-bit (upcast). coefficients: float64 [B, 6].
    Returns x_next float32 [B, I, C] and log_prob float64 [B], bitwise `gaussian_log_prob` of x_next; nan for a row
    without a log-prob (`ode`), which is a plain Euler step. Raises TypeError or ValueError for other dtypes or shapes.
    """
    _check(coefficients, v, noise=noise)
    x_next = gaussian_mean(x, v, coefficients) + _column(coefficients, 2, x) * noise
    return x_next, gaussian_log_prob(x, v, x_next, coefficients)


def gaussian_log_prob(x: Tensor, v: Tensor, x_next: Tensor, coefficients: Tensor) -> Tensor:
    """log_prob = c - w mean((x_next - (a x + b v))^2), float64 [B], differentiable in v; x_next is a constant.

    x, x_next: float32 [B, I, C]. v: [B, I, C], float32 or 16-bit (upcast). coefficients: float64 [B, 6].
    d log_prob / dv = 2 w b / (I C) (x_next - mean). A row without a log-prob gives nan: ask `require_log_prob` first.
    Raises TypeError or ValueError for other dtypes or shapes.
    """
    _check(coefficients, v, x_next=x_next)
    squares = (x_next.detach() - gaussian_mean(x, v, coefficients)).square()
    w, c = coefficients[:, 3:5].to(x.device).unbind(1)
    return c - w * _sample_mean(squares)


def gaussian_kl(v: Tensor, v_ref: Tensor, coefficients: Tensor) -> Tensor:
    """kl = k mean((v - v_ref)^2), float64 [B]: the KL of two steps from one x, whose means differ by b (v - v_ref).

    v, v_ref: [B, I, C], float32 or 16-bit (upcast); differentiable in both. coefficients: float64 [B, 6].
    Raises TypeError or ValueError for other dtypes or shapes.
    """
    _check(coefficients, v, v_ref=v_ref.float())
    squares = (v.float() - v_ref.float()).square()
    return coefficients[:, 5].to(v.device) * _sample_mean(squares)


def gaussian_mean(x: Tensor, v: Tensor, coefficients: Tensor) -> Tensor:
    """The step's mean a x + b v, float32 [B, I, C]: all of a deterministic step. Inputs as in `gaussian_step`."""
    _check(coefficients, v, x=x)
    return _column(coefficients, 0, x) * x + _column(coefficients, 1, x) * v.float()


def _column(coefficients: Tensor, index: int, like: Tensor) -> Tensor:
    """One coefficient, rounded once to float32, as [B, 1, 1] beside `like`."""
    return coefficients[:, index].to(device=like.device, dtype=torch.float32).view(-1, 1, 1)


def _sample_mean(values: Tensor) -> Tensor:
    """Mean over all but the first dim, float64 [B], as a fixed tree of additions.

    torch.sum may cut a long row by the number of threads and by the batch; a replayed log-prob would then miss the
    stored one in the last bit, and the parity of rollout and trainer could not be exact.
    """
    flat = values.flatten(1).double()
    count = flat.shape[1]
    width = 1 << (count - 1).bit_length()
    flat = torch.nn.functional.pad(flat, (0, width - count))
    while width > 1:
        width //= 2
        left, right = flat.reshape(len(flat), 2, width).unbind(1)
        flat = left + right
    return flat[:, 0] / count


def _check(coefficients: Tensor, v: Tensor, **latents: Tensor) -> None:
    if coefficients.dtype != torch.float64 or coefficients.shape != (len(v), 6):
        raise TypeError(
            f"coefficients must be float64 [B={len(v)}, 6], got {coefficients.dtype} {list(coefficients.shape)}: "
            "index flow.coefficient_table with the step of each sample"
        )
    if v.dim() != 3 or (v.numel() == 0 and len(v) > 0):
        raise ValueError(f"the velocity must be [B, I, C] with at least one element a sample, got {list(v.shape)}")
    for name, latent in latents.items():
        if latent.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {latent.dtype}: 16 bits move the ratio past the clip range")
        if latent.shape != v.shape:
            raise ValueError(f"{name} {list(latent.shape)} does not have the velocity's shape {list(v.shape)}")
