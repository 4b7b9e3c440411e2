# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs of an iteration, counted from what was sampled and trained on, and the utilisation that follows.

MFU as PaLM defines it (arXiv:2204.02311, appendix B): FLOPs that the algorithm needs, over the time of the iteration,
over what the devices could do. Rollout, training, reference and old log-probs count; recomputation and padding do not,
nor do the text encoder and the autoencoder. The time is that of the whole iteration, rewards and logging included.
"""

from __future__ import annotations

from functools import cache

import torch

from omni_engine.arguments import RolloutSettings
from omni_engine.models.costs import branch_flops, passes_of_branches
from omni_engine.models.policy import Policy
from omni_engine.models.stages import ModelSpec
from omni_engine.parallel.collectives import gather_over_data
from omni_engine.platform import get_platform
from omni_engine.rollout import IterationPlan, PromptEncoder


class FlopsMeter:
    """Counts an iteration when it is told its plan. All ranks call it alike."""

    def __init__(
        self,
        policy: Policy,
        encoder: PromptEncoder,
        rollout: RolloutSettings,
        needs_reference: bool,
        peak_tflops: float,
    ):
        """
        Args:
            needs_reference: whether the algorithm runs the reference weights.
            peak_tflops: of a device, in 1e12 FLOP/s; 0: as the platform knows or measures it.
        """
        self.policy, self.encoder, self.rollout = policy, encoder, rollout
        self.needs_reference = needs_reference
        self.peak = peak_tflops * 1e12 or get_platform().peak_flops(policy.config.params_dtype)
        self.flops = 0.0
        self._of_tokens = cache(self._spec)

    def count(self, plan: IterationPlan) -> None:
        """Add up the model FLOPs of an iteration over all replicas. A collective over the replicas."""
        tokens = [self.encoder.tokens(prompt) for prompt in plan.prompts]
        own = sum(self._sample(tokens[prompt]) for prompt in plan.prompt_of.tolist())
        local = torch.tensor([own], dtype=torch.float64, device=get_platform().device())
        self.flops = float(gather_over_data(local, self.policy.groups).sum())

    def rates(self, seconds: float) -> dict[str, float]:
        """Metrics of the counted iteration, which took `seconds`. Without a known peak there is no MFU."""
        rate = self.flops / seconds / self.policy.groups.world_size
        metrics = {"throughput/tflops_per_device": rate / 1e12}
        return metrics | {"throughput/mfu": rate / self.peak} if self.peak else metrics

    def _sample(self, tokens: int) -> float:
        """FLOPs of one sample whose prompt has so many tokens, both branches of guidance included."""
        passes = passes_of_branches(self.rollout, self.needs_reference)
        lengths = [tokens]
        if len(passes) > 1:
            lengths.append(self.encoder.tokens(self.encoder.negative_prompt))
        return float(sum(branch_flops(self._of_tokens(n), one) for n, one in zip(lengths, passes, strict=True)))

    def _spec(self, tokens: int) -> ModelSpec:
        return self.policy.family.costs(self.policy.shape.tokens, tokens, lora=self.policy.lora)
