# SPDX-License-Identifier: Apache-2.0
"""Brings the rewards of an iteration together: each is computed once, and every rank gets all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omni_engine.parallel import ParallelGroups
from omni_engine.parallel.collectives import broadcast_from_source, gather_over_data
from omni_engine.platform import get_platform
from omni_engine.reward import RewardHandle, RewardPool
from omni_engine.rollout import RolloutChunk
from omni_engine.training.optimizer import TrainingError


@dataclass(frozen=True)
class ScoredBatch:
    """Rewards of all N samples of an iteration, in the order of their ids, equal on every rank.

    Attributes:
        rewards: float64 [N]; 0 where not valid.
        groups: int64 [N], prompt slots.
        valid: bool [N], False where the reward could not be had: the sample is masked, never scored 0.
        local: int64 [B], positions of this rank's samples.
    """

    rewards: torch.Tensor
    groups: torch.Tensor
    valid: torch.Tensor
    local: torch.Tensor

    def metrics(self) -> dict[str, float]:
        """Reward statistics over the valid samples, and what failed."""
        rewards, groups = self.rewards[self.valid], self.groups[self.valid]
        spreads = []
        for group in groups.unique():
            members = rewards[groups == group]
            if len(members) > 1:
                spreads.append(members.std())
        spread = torch.stack(spreads) if spreads else rewards.new_zeros(1)
        alone = sum(int((groups == group).sum() == 1) for group in groups.unique())
        failed = int((~self.valid).sum())
        return {
            "reward/mean": float(rewards.mean()),
            "reward/std_within_group": float(spread.mean()),
            "reward/zero_std_ratio": float((spread < 1e-6).double().mean()),
            "rollout/failed_samples": float(failed),
            "rollout/masked_samples": float(failed + alone),
        }


class RewardCollector:
    """Sends pictures to the scorers as they come, and gathers the rewards when the advantage needs them."""

    def __init__(self, pool: RewardPool | None, groups: ParallelGroups):
        """`pool`: on the source rank of each replica, None on the others."""
        self.pool = pool
        self.parallel = groups
        self.handles: list[RewardHandle] = []
        self.last_failure: str | None = None

    def submit(self, chunk: RolloutChunk) -> None:
        """Start scoring a chunk's pictures (on the source rank)."""
        if self.pool is not None and chunk.images is not None:
            samples = chunk.samples
            prompts = [samples.prompts[index] for index in samples.prompt_of.tolist()]
            self.handles.append(self.pool.submit(chunk.images, prompts))

    def collect(self, ids: torch.Tensor, groups: torch.Tensor) -> ScoredBatch:
        """Wait for the rewards of this rank's samples (int64 [B] each, in submission order) and share them.

        A collective of all ranks.

        Raises:
            TrainingError: no sample of the iteration has a reward.
        """
        table = torch.zeros(len(ids), 2, dtype=torch.float64)
        rewards = [reward for handle in self.handles for reward in handle.result()]
        self.handles.clear()
        for row, reward in zip(table, rewards, strict=self.pool is not None):
            if reward.value is not None:
                row[0], row[1] = reward.value, 1.0
            else:
                self.last_failure = reward.failure
        device = get_platform().device()
        table = gather_over_data(broadcast_from_source(table.to(device), self.parallel), self.parallel).cpu()
        all_ids = gather_over_data(ids.to(device), self.parallel).cpu()
        all_groups = gather_over_data(groups.to(device), self.parallel).cpu()
        order = all_ids.argsort()
        scored = ScoredBatch(
            rewards=table[order, 0],
            groups=all_groups[order],
            valid=table[order, 1] > 0,
            local=torch.searchsorted(all_ids[order], ids),
        )
        if not bool(scored.valid.any()):
            raise TrainingError(
                f"no sample of this iteration could be scored; the last reason was: {self.last_failure}. "
                "Mend the scorer, then resume with --load"
            )
        return scored
