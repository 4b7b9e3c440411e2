# SPDX-License-Identifier: Apache-2.0
"""Evaluation: the same held-out prompts, from the same initial noise, by plain ODE steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from omni_engine.arguments import DataSettings
from omni_engine.flow import Schedule
from omni_engine.models.guidance import Guidance
from omni_engine.parallel import ParallelGroups
from omni_engine.reward import Reward, RewardPool
from omni_engine.rollout import RolloutEngine, RolloutRequest
from omni_engine.training.optimizer import TrainingError

PICTURES = 48
"""Pictures of a grid."""


@dataclass(frozen=True)
class Evaluation:
    """Result on rank 0; empty elsewhere.

    Attributes:
        rewards: mean of the trained reward as `reward`, and of each scorer by its name.
        images: uint8 [n, height, width, 3], the first pictures.
        prompts: of the pictures.
        captions: prompt and what the first scorer saw, for each picture.
        failed: prompts that could not be scored and are left out of the means.
    """

    rewards: dict[str, float]
    images: np.ndarray
    prompts: list[str]
    captions: list[str]
    failed: int


class Evaluator:
    """Runs evaluations; all ranks call it alike."""

    def __init__(
        self,
        engine: RolloutEngine,
        pool: RewardPool | None,
        prompts: Sequence[str],
        schedule: Schedule,
        guidance: Guidance,
        settings: DataSettings,
        micro_batch_size: int,
        groups: ParallelGroups,
    ):
        """`prompts`: the held-out prompts, all of which are used. `pool`: on the source rank of each replica."""
        self.engine, self.pool, self.groups = engine, pool, groups
        share = -(-len(prompts) // groups.dp_size)
        first = min(groups.dp_rank * share, len(prompts))
        self.own = list(prompts[first : first + share])
        ids = torch.arange(first, first + len(self.own))
        self.request = RolloutRequest(
            ids=ids,
            groups=ids,
            prompts=self.own,
            prompt_of=torch.arange(len(self.own)),
            seed=settings.eval_seed,
            schedule=schedule,
            sde_type="sde",
            noise_level=1.0,
            window=(),
            guidance=guidance,
            micro_batch_size=micro_batch_size,
        )

    def run(self) -> Evaluation:
        """Sample, score, and bring the results to rank 0.

        Raises:
            TrainingError: no held-out prompt could be scored.
        """
        handles, images = [], []
        if self.own:
            for chunk in self.engine.generate(self.request):
                if self.pool is not None and chunk.images is not None:
                    prompts = [chunk.samples.prompts[index] for index in chunk.samples.prompt_of.tolist()]
                    handles.append(self.pool.submit(chunk.images, prompts, watch=True))
                    images.append(chunk.images)
        rewards = [reward for handle in handles for reward in handle.result()]
        pictures = np.concatenate(images)[:PICTURES] if images else None
        return self._gather((self.own, rewards, pictures) if self.groups.is_model_source else None)

    def _gather(self, mine: tuple[list[str], list[Reward], np.ndarray | None] | None) -> Evaluation:
        parts: list[Any] = [None] * self.groups.world_size
        dist.all_gather_object(parts, mine)
        parts = [part for part in parts if part is not None and part[0]]
        prompts = [prompt for part in parts for prompt in part[0]]
        rewards: list[Reward] = [reward for part in parts for reward in part[1]]
        scored = [reward for reward in rewards if reward.value is not None]
        if not scored:
            raise TrainingError(f"no held-out prompt could be scored; the last reason was: {rewards[-1].failure}")
        means = {"reward": float(np.mean([reward.value for reward in scored if reward.value is not None]))}
        names = {name for reward in rewards for name in reward.parts}
        if self.pool is not None and len(self.pool.weighted) == 1:
            names -= set(self.pool.weighted)  # it is the reward itself
        for name in sorted(names):
            means[name] = float(np.mean([reward.parts[name] for reward in rewards if name in reward.parts]))
        images = np.concatenate([part[2] for part in parts])[:PICTURES]
        captions = [
            f"{prompt} -> {next(iter(reward.texts.values()), '?')}"
            for prompt, reward in zip(prompts[: len(images)], rewards, strict=False)
        ]
        return Evaluation(means, images, prompts[: len(images)], captions, len(rewards) - len(scored))
