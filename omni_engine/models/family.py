# SPDX-License-Identifier: Apache-2.0
"""What a model family gives to the engine. A family registers itself in one file of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from omni_engine.arguments import LoraSettings, ParallelSettings
from omni_engine.flow import Schedule
from omni_engine.models.communication import Network
from omni_engine.models.mapping import ModelMapping
from omni_engine.models.stages import ModelSpec
from omni_engine.parallel import ParallelGroups, Segment
from omni_engine.platform.attention_kernels import AttentionKernel


@dataclass(frozen=True)
class TextCondition:
    """Text embeddings of a batch, padded on the right.

    Attributes:
        embeddings: [B, T, E], zero on padding.
        lengths: valid tokens of each sample.
    """

    embeddings: torch.Tensor
    lengths: tuple[int, ...]

    @staticmethod
    def collate(rows: Sequence[torch.Tensor], tokens: int) -> TextCondition:
        """Pad embeddings [T_i, E] to `tokens` and stack them."""
        padded = rows[0].new_zeros(len(rows), tokens, rows[0].shape[1])
        for target, row in zip(padded, rows, strict=True):
            target[: row.shape[0]] = row
        return TextCondition(padded, tuple(row.shape[0] for row in rows))


@dataclass(frozen=True)
class DenoiserInput:
    """One micro-batch for a stage; every stage gets it, for lengths and positions.

    Attributes:
        latents: by modality, `{"image": [B, I, C]}` float32.
        time: the model's time [B] float32 in [0, 1].
        text: the condition of this branch.
        grid: (frames, height, width) of the latent in patches.
    """

    latents: dict[str, torch.Tensor]
    time: torch.Tensor
    text: TextCondition
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class LatentShape:
    """Tokens and channels of one sample's packed latent, and its grid of patches."""

    tokens: int
    channels: int
    grid: tuple[int, int, int]


class Stage(MegatronModule):
    """A (virtual) pipeline stage of a family's network: forward(DenoiserInput) gives the velocity [B, I, C] on the last
    stage and the packed tensor [S, B, H] on the others.

    Attributes:
        blocks: the transformer blocks by their number in the whole network.
        vp_stage: which of its rank's virtual stages this is; None where a rank has one stage.
    """

    blocks: torch.nn.ModuleDict
    vp_stage: int | None = None

    def segments(self, inputs: DenoiserInput) -> list[Segment]:
        """Layout of the tensor between stages, on this rank."""
        raise NotImplementedError


class Components(Protocol):
    """Frozen parts of a pipeline: the prompt encoder and the latent codec."""

    def encode(self, prompts: Sequence[str]) -> list[torch.Tensor]:
        """Text embeddings, one [T_i, E] a prompt; the same for a prompt whatever stands beside it."""
        ...

    def decode(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Pictures uint8 [B, height, width, 3] on the host from packed latents [B, I, C]."""
        ...


class Family(Protocol):
    """One family of generators, bound to a model folder.

    Attributes:
        text_features: E of a text embedding.
    """

    name: str
    modality: str
    mapping: ModelMapping
    text_features: int

    def latent_shape(self, height: int, width: int) -> LatentShape: ...

    def schedule(self, num_inference_steps: int, height: int, width: int) -> Schedule: ...

    def model_time(self, schedule: Schedule) -> torch.Tensor:
        """The time the network is given at each step, float32 [N]."""
        ...

    def costs(
        self, image_tokens: int, text_tokens: int, *, context_parallel: bool = False, lora: LoraSettings | None = None
    ) -> ModelSpec:
        """Weights, work and kept activations of each part for samples of these lengths, padding included.

        Args:
            context_parallel: whether the tokens of a sample are divided over ranks.
            lora: adapters that are trained beside frozen weights, where it is enabled.
        """
        ...

    def network(self) -> Network:
        """The layers as communication sees them."""
        ...

    def transformer_config(self, groups: ParallelGroups, parallel: ParallelSettings, bf16: bool) -> TransformerConfig:
        """Megatron's view of the model."""
        ...

    def build_stage(
        self, config: TransformerConfig, groups: ParallelGroups, blocks: range, kernel: AttentionKernel, recompute: str
    ) -> Stage:
        """A pipeline stage with these blocks, weights uninitialised. `recompute`: none, selective or full."""
        ...

    def combine_guidance(self, conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
        """Velocity of the guided model from its two branches, each [B, I, C]."""
        ...

    def load_components(self, max_text_tokens: int) -> Components: ...


_FAMILIES: dict[str, Callable[[Path], Family]] = {}


def register_family(name: str) -> Callable[[Callable[[Path], Family]], Callable[[Path], Family]]:
    """Class decorator: makes a family known by name; it is built from the pipeline folder."""

    def register(factory: Callable[[Path], Family]) -> Callable[[Path], Family]:
        _FAMILIES[name] = factory
        return factory

    return register


def build_family(name: str, folder: str | Path) -> Family:
    """The family of that name, reading its config files from a pipeline folder.

    Raises:
        ValueError: no family has that name.
        FileNotFoundError: the folder lacks a config file.
    """
    if name not in _FAMILIES:
        raise ValueError(f"unknown model family '{name}'; known: {', '.join(sorted(_FAMILIES))}")
    return _FAMILIES[name](Path(folder))
