# SPDX-License-Identifier: Apache-2.0
"""The few numbers of a diffusers pipeline folder that settings must agree with. Only JSON is read, no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PipelineFacts:
    """Numbers read from a pipeline folder; None where the folder does not tell.

    Attributes:
        attention_heads: heads of the transformer.
        layers: blocks of the transformer.
        pixel_multiple: height and width must be multiples of this: the VAE's scale factor times the 2 x 2 packing,
            `2 ** len(temperal_downsample) * 2` as in diffusers' QwenImagePipeline.
    """

    attention_heads: int | None = None
    layers: int | None = None
    pixel_multiple: int | None = None

    def image_tokens(self, height: int, width: int) -> int | None:
        """Packed latent tokens of an image of `height` x `width` pixels."""
        if self.pixel_multiple is None:
            return None
        return (height // self.pixel_multiple) * (width // self.pixel_multiple)


def read_pipeline_facts(folder: str) -> PipelineFacts:
    """Facts of the pipeline in `folder`; what is missing or unreadable is left None (loading the model reports it)."""
    transformer = _read_json_object(Path(folder) / "transformer" / "config.json")
    downsample = _read_json_object(Path(folder) / "vae" / "config.json").get("temperal_downsample")
    return PipelineFacts(
        attention_heads=_positive_int(transformer.get("num_attention_heads")),
        layers=_positive_int(transformer.get("num_layers")),
        pixel_multiple=2 ** len(downsample) * 2 if isinstance(downsample, list) else None,
    )


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _positive_int(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
