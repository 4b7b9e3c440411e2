# SPDX-License-Identifier: Apache-2.0
"""Classifier-free guidance as branches of one velocity and a function that combines them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from omni_engine.models.family import DenoiserInput, Family, TextCondition


@dataclass(frozen=True)
class Guidance:
    """How the velocity of a sample is made.

    Attributes:
        scale: true-CFG scale; 1 leaves the unconditional branch out.
        gradient: `both` sends gradients through both branches; `conditional` treats the unconditional one as a
            constant, as flow_grpo does, and saves its backward pass.
    """

    scale: float
    gradient: str

    @property
    def active(self) -> bool:
        return self.scale > 1.0

    @property
    def detached(self) -> bool:
        """True where training runs the unconditional branch on its own and without a graph."""
        return self.active and self.gradient == "conditional"


@dataclass(frozen=True)
class Conditions:
    """Text conditions of a micro-batch by branch; `unconditional` is None without guidance."""

    conditional: TextCondition
    unconditional: TextCondition | None

    def only_conditional(self) -> Conditions:
        return Conditions(self.conditional, None)

    def only_unconditional(self) -> Conditions:
        """The unconditional branch as a condition of its own."""
        if self.unconditional is None:
            raise ValueError("there is no unconditional branch without guidance")
        return Conditions(self.unconditional, None)


def joined_input(
    latents: torch.Tensor, time: torch.Tensor, conditions: Conditions, modality: str, grid: tuple[int, int, int]
) -> DenoiserInput:
    """Both branches stacked along the batch, conditional first: [2B, ...]; one branch where there is no guidance."""
    if conditions.unconditional is None:
        return DenoiserInput({modality: latents}, time, conditions.conditional, grid)
    both = (conditions.conditional, conditions.unconditional)
    tokens = max(branch.embeddings.shape[1] for branch in both)
    embeddings = torch.cat([F.pad(b.embeddings, (0, 0, 0, tokens - b.embeddings.shape[1])) for b in both])
    text = TextCondition(embeddings, both[0].lengths + both[1].lengths)
    return DenoiserInput({modality: torch.cat([latents, latents])}, torch.cat([time, time]), text, grid)


def guided_velocity(
    family: Family, output: torch.Tensor, guidance: Guidance, unconditional: torch.Tensor | None
) -> torch.Tensor:
    """Velocity [B, I, C] of the guided model.

    Args:
        output: the model's output: [2B, I, C] for joined branches, [B, I, C] for the conditional one alone.
        unconditional: the other branch where it was run on its own.
    """
    if not guidance.active:
        return output
    if unconditional is None:
        output, unconditional = output.chunk(2)
    return family.combine_guidance(output, unconditional, guidance.scale)
