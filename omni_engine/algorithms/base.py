# SPDX-License-Identifier: Apache-2.0
"""What an algorithm is to the training step. A decision is one action of one sample: here one SDE step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Needs:
    """What the trainer has to prepare beyond rollout log-probs.

    reference: predictions of the model as loaded, for `DecisionStats.kl`.
    """

    reference: bool = False


@dataclass(frozen=True)
class DecisionStats:
    """D decisions of this rank's micro-batch, flat; D may be 0, so that all ranks run the same number of micro-batches.

    log_prob: float64 [D] of the policy being trained, with its graph.
    old_log_prob: float64 [D] of the rollout, in the same convention.
    advantages: float64 [D], of each decision's sample.
    weights: [D], 1, or 0 for a masked decision, whose other numbers then count for nothing, finite or not.
    kl: float64 [D] with its graph, or None without a reference.
    sample_ids: int64 [D], only to name a faulty decision.

    Raises TypeError for a log-prob that is not float64 and ValueError for a length that is not D.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    weights: Tensor
    kl: Tensor | None = None
    sample_ids: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("log_prob", "old_log_prob", "kl"):
            value = getattr(self, name)
            if value is not None and value.dtype != torch.float64:
                raise TypeError(f"DecisionStats.{name} must be float64, got {value.dtype}: rounding moves the ratio")
        for name in ("log_prob", "old_log_prob", "advantages", "weights", "kl", "sample_ids"):
            value = getattr(self, name)
            if value is not None and value.shape != (len(self.log_prob),):
                raise ValueError(
                    f"DecisionStats.{name} must be [D={len(self.log_prob)}], one a decision, got {list(value.shape)}"
                )


@dataclass(frozen=True)
class LossOutput:
    """loss: scalar to differentiate, this micro-batch's sum over the global count. All the rest carries no graph.

    sums: scalars that are added up over micro-batches and ranks; maxima: scalars of which the largest counts. The keys
    are the same on every rank and for every micro-batch.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor] = field(default_factory=dict)


class Algorithm(ABC):
    """Rewards to advantages, and decisions to a loss; knows neither latents nor parallel layouts."""

    needs: Needs

    @abstractmethod
    def advantages(self, rewards: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
        """Advantages float64 [N] of all N samples of the iteration, over all ranks.

        rewards: float64 [N]. groups: int64 [N], the prompt slot of each sample. valid: bool [N], False for a sample
        without a reward, which gets 0. Raises ValueError for a valid reward that is not finite.
        """

    @abstractmethod
    def loss(self, stats: DecisionStats, global_count: float) -> LossOutput:
        """The loss of a micro-batch, whose sum over all micro-batches and ranks is the loss of the update.

        global_count: decisions of the whole update that are not masked, over all ranks; the same for each of its
        micro-batches, which makes the sum independent of how the samples are split.
        Raises ValueError for a count that is not positive or a decision whose numbers are not finite.
        """

    @abstractmethod
    def metrics(self, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """Metrics of an update from its reduced `sums` (and `maxima`); empty if every decision was masked."""
