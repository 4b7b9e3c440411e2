# SPDX-License-Identifier: Apache-2.0
"""Settings of the model that is trained and of the images it makes."""

from __future__ import annotations

from dataclasses import dataclass

from omni_engine.arguments.flag import flag


@dataclass(frozen=True)
class ModelSettings:
    """Model: which pipeline folder is trained, at which resolution and precision."""

    model: str = flag(help="Folder of the diffusers pipeline that is trained (the one that holds model_index.json).")
    model_family: str = flag(
        "qwen_image", choices=("qwen_image",), help="Family whose layers and mapping table are used."
    )
    height: int = flag(16, unit="pixels", at_least=1, source="diffusers", help="Height of the generated images.")
    width: int = flag(32, unit="pixels", at_least=1, source="diffusers", help="Width of the generated images.")
    bf16: bool = flag(
        False,
        source="Megatron",
        help="Hold the parameters and run the network in bfloat16, with float32 main parameters in the optimizer. "
        "Latents and log-probs stay float32.",
    )
    max_text_tokens: int = flag(
        1024,
        unit="tokens",
        at_least=1,
        at_most=1024,
        source="diffusers (max_sequence_length)",
        help="A prompt of more tokens than this is refused.",
    )
    recompute_granularity: str = flag(
        "none",
        choices=("none", "selective", "full"),
        source="Megatron",
        help="selective: make norms, modulation, rotary positions and GELU again in the backward pass instead of "
        "keeping them. full: keep only the input of each block and run the whole block again.",
    )
