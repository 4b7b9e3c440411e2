# SPDX-License-Identifier: Apache-2.0
"""Adapters outside the engine: the file that diffusers and peft read, and the weights that they are added to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

ADAPTER_FILE = "pytorch_lora_weights.safetensors"
"""Diffusers' name for it (`LORA_WEIGHT_NAME_SAFE`)."""
_MODEL = "transformer"
_A, _B, _WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"


def write_adapter_file(tensors: Iterator[tuple[str, torch.Tensor]], rank: int, alpha: float, file: Path) -> None:
    """Write adapters as diffusers' `save_lora_weights` does.

    Names get the prefix of the pipeline's component. Rank and alpha stand in the file's metadata under
    `lora_adapter_metadata`, from which `load_lora_weights` makes peft's `LoraConfig`: without it alpha would be taken
    for the rank.
    """
    weights = dict(tensors)
    config = {
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted({name.removesuffix(_A) for name in weights if name.endswith(_A)}),
    }
    packed = {f"{_MODEL}.{key}": value for key, value in config.items()}
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(packed, indent=2, sort_keys=True)}
    save_file({f"{_MODEL}.{name}": tensor for name, tensor in weights.items()}, file, metadata=metadata)


def adapted_shapes(adapters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that adapters of these shapes belong to, by the weights' names."""
    return {
        name.removesuffix(_A) + _WEIGHT: (adapters[name.removesuffix(_A) + _B][0], shape[1])
        for name, shape in adapters.items()
        if name.endswith(_A)
    }


def merged(
    tensors: Iterator[tuple[str, torch.Tensor]], adapters: Mapping[str, torch.Tensor], scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's tensors with the adapters added to their weights: W + scale B A, in float32 and rounded once."""
    for name, tensor in tensors:
        module = name.removesuffix(_WEIGHT)
        if module + _A in adapters:
            product = adapters[module + _B].float() @ adapters[module + _A].float()
            tensor = torch.add(tensor.float(), product, alpha=scale).to(tensor.dtype)
        yield name, tensor
