# SPDX-License-Identifier: Apache-2.0
"""Adaptive layer norm: a table of conditioning rows [R, B, H] shifts, scales and gates the tokens [S, B, H].

Qwen-Image has one row a sample (R = 1), which broadcasts over the tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def layer_norm_modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """LayerNorm without affine weights, then x * (1 + scale) + shift.

    Args:
        x: tokens [S, B, H].
        shift, scale: [1, B, H].
    Returns: [S, B, H] in the dtype of x.
    """
    return torch.addcmul(shift, F.layer_norm(x, (x.shape[-1],), eps=eps), 1 + scale)


def gated_residual(x: torch.Tensor, gate: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """x + gate * update. x, update [S, B, H], gate [1, B, H]."""
    return torch.addcmul(x, gate, update)
