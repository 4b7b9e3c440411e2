# SPDX-License-Identifier: Apache-2.0
"""Which implementation of a layer a network is built of: the one place that chooses, after Megatron's `ModuleSpec`.

A model file asks `layer_spec(config)` for its layers and has no branch on the implementation. What has no choice is
not in it:

- Attention is ours: it joins two streams, masks padding by length and is sharded over Ulysses x ring with kernels that
  the platform gives. Transformer-engine's attention shards by Megatron's context-parallel layout, of causal language
  models, and takes no joint streams.
- Modulation and replicated linear layers are ours: modulation gathers its output, which transformer-engine refuses,
  and its input is not sharded by sequence when the tokens are; both work on a row or two a sample.
- Norms without weights of their own are fused with the modulation that follows, and the norm of query and key heads
  takes both streams in one pass and keeps less for the backward pass than two of transformer-engine's would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from omni_engine.parallel.linear import ColumnParallelLinear, RowParallelLinear
from omni_engine.parallel.norm import RMSNorm


@dataclass(frozen=True)
class LayerSpec:
    """Makers of layers.

    Attributes:
        column_linear, row_linear: (in features, out features, config) -> module, both of the whole, not of a rank.
        rms_norm: (width, epsilon, config) -> module.
    """

    column_linear: Callable[[int, int, TransformerConfig], Any] = ColumnParallelLinear
    row_linear: Callable[[int, int, TransformerConfig], Any] = RowParallelLinear
    rms_norm: Callable[[int, float, TransformerConfig], Any] = RMSNorm


def layer_spec(config: TransformerConfig) -> LayerSpec:
    """The layers of `config.transformer_impl`.

    Raises:
        ValueError: there is no such implementation, or its package cannot be imported.
    """
    if config.transformer_impl == "local":
        return LayerSpec()
    if config.transformer_impl == "transformer_engine":
        from omni_engine.parallel import transformer_engine as engine

        engine.require_transformer_engine()
        return LayerSpec(engine.ColumnLinear, engine.RowLinear, engine.rms_norm)
    raise ValueError(f"there is no transformer implementation {config.transformer_impl!r}")
