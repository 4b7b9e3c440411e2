# SPDX-License-Identifier: Apache-2.0
"""Parallel linear layers and norms of transformer-engine, by Megatron-core's wrappers of them.

Only imported where `--transformer-impl transformer_engine` asks for it. Written from the source of megatron-core 0.16.1
and 0.19.2 (`megatron/core/extensions/transformer_engine.py`); not run yet, since that needs an NVIDIA GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.transformer.transformer_config import TransformerConfig

from omni_engine.parallel.linear import adapted, keep_uninitialized
from omni_engine.parallel.lora import LoraAdapter


class ColumnLinear(TEColumnParallelLinear):
    """As `ColumnParallelLinear`: X [S, B, in] (S/tp under sequence parallel) -> Y [S, B, out/tp]."""

    on_tokens = True

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig):
        super().__init__(
            in_features,
            out_features,
            config=config,
            init_method=keep_uninitialized,
            gather_output=False,
            bias=True,
            skip_bias_add=False,
            is_expert=False,
            tp_group=get_tensor_model_parallel_group(),
        )
        self.adapter: LoraAdapter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return adapted(self.adapter, x, super().forward(x)[0])


class RowLinear(TERowParallelLinear):
    """As `RowParallelLinear`: X [S, B, in/tp] -> Y [S, B, out] (S/tp under sequence parallel)."""

    on_tokens = True

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig):
        super().__init__(
            in_features,
            out_features,
            config=config,
            init_method=keep_uninitialized,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
            is_expert=False,
            tp_group=get_tensor_model_parallel_group(),
        )
        self.adapter: LoraAdapter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return adapted(self.adapter, x, super().forward(x)[0])


def rms_norm(width: int, eps: float, config: TransformerConfig) -> Any:
    """As `RMSNorm`; the class is transformer-engine's, which `config.normalization` must ask for."""
    return TENorm(config, width, eps)


def require_transformer_engine() -> None:
    """Say so where the package cannot be imported: Megatron hides the reason and makes mock-ups of its classes.

    Raises:
        ValueError: it cannot.
    """
    if HAVE_TE:
        return
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError as error:
        raise ValueError(
            f"--transformer-impl transformer_engine: the package cannot be imported ({error}). Install the "
            "transformer-engine[pytorch] that is made for this torch, or use --transformer-impl local"
        ) from error
