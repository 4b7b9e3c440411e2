# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO (arXiv:2505.05470): PPO's clipped ratio on denoising steps, with group-relative advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from omni_engine.algorithms.advantages import group_advantages
from omni_engine.algorithms.base import Algorithm, DecisionStats, LossOutput, Needs
from omni_engine.arguments.algorithm import AlgorithmSettings


class FlowGRPO(Algorithm):
    """loss = mean over decisions of max(-A r, -A clip(r, 1 - clip, 1 + clip)) + kl_coef kl, r = exp(log_prob - old)."""

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.settings = settings
        self.needs = Needs(reference=settings.kl_coef > 0.0)

    def advantages(self, rewards: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
        """See `group_advantages`."""
        return group_advantages(
            rewards,
            groups,
            valid,
            std=self.settings.advantage_std,
            unbiased=self.settings.advantage_std_unbiased,
            epsilon=self.settings.advantage_epsilon,
            std_floor=self.settings.advantage_std_floor,
            clip=self.settings.advantage_clip,
        )

    def loss(self, stats: DecisionStats, global_count: float) -> LossOutput:
        """See `Algorithm.loss`. Waits for the values once a micro-batch, to refuse any that is not finite."""
        if not global_count > 0:
            raise ValueError(f"global_count={global_count}: an update without a decision to train on must be skipped")
        if self.needs.reference and stats.kl is None:
            raise ValueError(f"kl_coef={self.settings.kl_coef} needs DecisionStats.kl, against the reference model")
        weights = stats.weights.to(torch.float64)
        used = weights != 0
        log_ratio = torch.where(used, stats.log_prob - stats.old_log_prob.detach(), 0.0)
        kl = torch.where(used, stats.kl, 0.0) if stats.kl is not None else torch.zeros_like(log_ratio)
        advantages = torch.where(used, stats.advantages.detach(), 0.0)
        ratio = log_ratio.exp()
        _refuse_not_finite(stats, ratio, kl, advantages)

        # Our own advantages are within the bound already; it holds for those that come from elsewhere too.
        advantages = advantages.clamp(-self.settings.advantage_clip, self.settings.advantage_clip)
        clip = self.settings.clip_range
        policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - clip, 1.0 + clip))
        total = (weights * (policy + self.settings.kl_coef * kl)).sum()

        with torch.no_grad():
            off_one = log_ratio.expm1()  # r - 1 without cancellation
            sums = {
                "decisions": weights,
                "policy_loss": weights * policy,
                "kl": weights * kl,
                "log_ratio": weights * log_ratio,
                "ratio_off_one": weights * off_one,
                "ratio_off_one_squared": weights * off_one.square(),
                "clipped_high": weights * (off_one > clip),
                "clipped_low": weights * (off_one < -clip),
            }
            sums = {name: summand.detach().sum() for name, summand in sums.items()}
            sums["loss"] = total.detach()
            largest = off_one.abs().max() if len(off_one) else off_one.new_zeros(())
        return LossOutput(loss=total / global_count, sums=sums, maxima={"ratio_off_one": largest})

    def metrics(self, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """See `Algorithm.metrics`. ratio_std divides by n - 1; clip fractions count ratios outside the clip range."""
        names = list(sums)
        host = dict(zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True))
        count = host["decisions"]
        if count <= 0:
            return {}
        off_one = host["ratio_off_one"] / count
        variance = (host["ratio_off_one_squared"] - count * off_one**2) / max(count - 1.0, 1.0)
        metrics = {
            "policy/loss": host["loss"] / count,
            "policy/policy_loss": host["policy_loss"] / count,
            "policy/kl": host["kl"] / count,
            "policy/log_ratio_mean": host["log_ratio"] / count,
            "policy/ratio_mean": 1.0 + off_one,
            "policy/ratio_std": math.sqrt(max(variance, 0.0)),
            "policy/clip_fraction_high": host["clipped_high"] / count,
            "policy/clip_fraction_low": host["clipped_low"] / count,
        }
        if maxima is not None:
            metrics["policy/ratio_off_one_max"] = float(maxima["ratio_off_one"])
        return metrics


def _refuse_not_finite(stats: DecisionStats, ratio: Tensor, kl: Tensor, advantages: Tensor) -> None:
    ratio, kl = ratio.detach(), kl.detach()
    faulty = ~(torch.isfinite(ratio) & torch.isfinite(kl) & torch.isfinite(advantages))
    if not faulty.any():
        return
    position = int(faulty.nonzero()[0])
    sample = f" (sample {int(stats.sample_ids[position])})" if stats.sample_ids is not None else ""
    raise ValueError(
        f"decision {position}{sample} is not finite: ratio exp({float(stats.log_prob.detach()[position])} - "
        f"{float(stats.old_log_prob[position])}) = {float(ratio[position])}, KL {float(kl[position])}, advantage "
        f"{float(advantages[position])}; {int(faulty.sum())} such decisions in this micro-batch: rollout and trainer "
        "disagree, or the weights diverged"
    )
