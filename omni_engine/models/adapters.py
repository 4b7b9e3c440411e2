# SPDX-License-Identifier: Apache-2.0
"""LoRA on a built model: which layers get adapters follows from the mapping table, so no model file knows of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from omni_engine.arguments import LoraSettings
from omni_engine.flow import philox_normal
from omni_engine.flow.noise import Stream
from omni_engine.models.mapping import ModelMapping
from omni_engine.parallel import LoraAdapter, ParallelGroups


def attach_adapters(
    chunks: Sequence[torch.nn.Module], mapping: ModelMapping, lora: LoraSettings, config: TransformerConfig
) -> ModelMapping:
    """Freeze the chunks of a rank and give the layers that are named new adapters, which are zero.

    A layer that is frozen already, because nothing reads it, gets none.

    Returns: the table with the adapters besides.

    Raises:
        ValueError: a target is no layer of the model, or a chunk has none of the targets.
    """
    places = {place.layer: place for place in mapping.adapter_places(lora.lora_target_modules)}
    for chunk in chunks:
        layers = {path: module for path, module in chunk.named_modules() if path in places}
        adapters = []
        for path, layer in layers.items():
            place = places[path]
            if layer.weight.requires_grad:
                adapter = LoraAdapter(
                    layer,
                    place.weight.shard_dim,
                    place.places,
                    len(place.weight.sources),
                    lora.lora_rank,
                    lora.scale,
                    config,
                )
                layer.adapter = adapter
                adapters.append(adapter)
        if not adapters:
            raise ValueError(
                f"--lora-target-modules {' '.join(lora.lora_target_modules)}: a pipeline stage has no such layer, so "
                "there is nothing to train in it; add a module that every block has, such as to_q, or use one stage"
            )
        chunk.requires_grad_(False)
        for adapter in adapters:
            adapter.requires_grad_(True)
    return mapping.with_adapters(lora.lora_target_modules)


@torch.no_grad()
def initialize_adapters(
    adapters: Mapping[str, torch.nn.Parameter], mapping: ModelMapping, groups: ParallelGroups, rank: int, seed: int
) -> None:
    """Every B zero and every A Gaussian with standard deviation 1 / rank: peft's "gaussian", which flow_grpo uses.

    A whole A is a function of (seed, Hugging Face name) from which a rank takes its part, so all layouts start alike.

    Args:
        adapters: parameters by path.
        mapping: the table that has them.
        rank: of the adapters.
    """
    for path, entry in mapping.of(adapters).items():
        for name, piece in zip(entry.sources, entry.split(adapters[path]), strict=True):
            if name.endswith("lora_B.weight"):
                piece.zero_()
                continue
            shards = 1 if entry.shard_dim is None else groups.tp_size
            features = piece.shape[1] * shards
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            sample = torch.zeros(1, dtype=torch.int64, device=piece.device)
            drawn = philox_normal(int.from_bytes(digest[:8], "big"), sample, 0, Stream.ADAPTER, rank * features)
            whole = drawn.view(rank, features) / rank
            piece.copy_(whole.chunk(shards, dim=1)[groups.tp_rank if shards > 1 else 0])
