# SPDX-License-Identifier: Apache-2.0
"""What a rollout engine is asked for and what it gives back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from omni_engine.flow import Samples, Schedule
from omni_engine.models.guidance import Guidance


@dataclass(frozen=True)
class RolloutRequest:
    """Samples to make, by their global numbers.

    Attributes:
        ids, groups, prompts, prompt_of: as in `IterationPlan`.
        seed: of the noise; a sample's noise is a function of (seed, id, step).
        schedule: the sigma table; an engine uses this one and no other.
        sde_type: `sde`, `cps` or `dance_sde` inside the window; steps outside it are Euler steps.
        noise_level: eta of the stochastic steps.
        window: indices of the stochastic steps; empty for an evaluation.
        guidance: branches of the velocity.
        micro_batch_size: samples of one forward pass. The trainer uses the same micro-batches, so that its log-probs
            are those of the rollout bit for bit.
    """

    ids: torch.Tensor
    groups: torch.Tensor
    prompts: list[str]
    prompt_of: torch.Tensor
    seed: int
    schedule: Schedule
    sde_type: str
    noise_level: float
    window: tuple[int, ...]
    guidance: Guidance
    micro_batch_size: int


@dataclass(frozen=True)
class RolloutChunk:
    """Some finished samples of a request, in its order.

    Attributes:
        samples: their decisions on the window's steps (no segment where the window is empty).
        images: uint8 [b, height, width, 3] on the rank that asks for rewards, None on the others.
    """

    samples: Samples
    images: np.ndarray | None


class RolloutEngine(Protocol):
    """Makes samples with the policy's weights."""

    def generate(self, request: RolloutRequest) -> Iterator[RolloutChunk]:
        """Finished chunks as they come, so that scoring overlaps with sampling. All ranks iterate to the end."""
        ...

    def update_weights(self, version: int) -> None:
        """Take over the trainer's weights of that version."""
        ...
