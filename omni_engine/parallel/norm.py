# SPDX-License-Identifier: Apache-2.0
"""The norm with weights of its own, held whole on every rank. Norms that modulation shifts and scales have none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from omni_engine.parallel.linear import mark_replicated
from omni_engine.platform import get_platform


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the features of tokens x [..., width]."""

    def __init__(self, width: int, eps: float, config: TransformerConfig):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(width, dtype=config.params_dtype, device=get_platform().device()))
        mark_replicated(self.weight, config, on_tokens=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
