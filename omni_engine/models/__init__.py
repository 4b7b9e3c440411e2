# SPDX-License-Identifier: Apache-2.0
"""Model families on Megatron-core: the network, its mapping to Hugging Face names, its prompt encoder and codec."""

from omni_engine.models import qwen_image as _qwen_image  # registers itself
from omni_engine.models.family import (
    Components,
    DenoiserInput,
    Family,
    LatentShape,
    TextCondition,
    build_family,
    register_family,
)

__all__ = [
    "Components",
    "DenoiserInput",
    "Family",
    "LatentShape",
    "TextCondition",
    "build_family",
    "register_family",
]

del _qwen_image
