# SPDX-License-Identifier: Apache-2.0
"""Settings of sampling: how many images, over which denoising steps, with how much noise."""

from __future__ import annotations

from dataclasses import dataclass

from omni_engine.arguments.flag import flag


@dataclass(frozen=True)
class RolloutSettings:
    """Rollout: how the samples of an iteration are drawn."""

    rollout_engine: str = flag("native", choices=("native",), help="native: the policy being trained samples itself.")
    prompts_per_step: int = flag(16, unit="prompts", at_least=1, help="Prompts of one iteration, over all ranks.")
    samples_per_prompt: int = flag(
        12,
        unit="samples",
        at_least=2,
        help="Samples of each prompt: the group that rewards are compared in.",
    )
    num_inference_steps: int = flag(
        10, unit="steps", at_least=1, source="diffusers", help="Denoising steps of a training sample."
    )
    sde_type: str = flag(
        "sde",
        choices=("sde", "cps", "dance_sde"),
        source="flow_grpo (sde, cps), DanceGRPO (dance_sde)",
        help="Form of the stochastic step inside the window. Outside it the steps are the plain ODE.",
    )
    noise_level: float = flag(
        0.7, above=0, source="flow_grpo", help="Noise of a stochastic step (eta). For cps at most 1."
    )
    sde_window_size: int = flag(
        2,
        unit="steps",
        at_least=1,
        source="flow_grpo",
        help="Consecutive stochastic steps, which are the ones trained on.",
    )
    sde_window_range: tuple[int, int] = flag(
        (0, 5),
        unit="steps",
        at_least=0,
        source="flow_grpo",
        help="The window is drawn anew every iteration inside [LOW, HIGH), steps counted from 0.",
    )
    true_cfg_scale: float = flag(
        1.0,
        at_least=1,
        source="diffusers",
        help="Classifier-free guidance scale. 1: no guidance, one forward pass a step.",
    )
    negative_prompt: str = flag(
        " ", source="diffusers", help="Text of the unconditional branch, read only when the guidance scale is above 1."
    )
    cfg_gradient: str = flag(
        "both",
        choices=("both", "conditional"),
        help="Branches of guidance that receive a gradient. conditional: the unconditional branch is a constant.",
    )
    old_log_prob: str = flag(
        "rollout",
        choices=("rollout", "recompute"),
        help="Where the denominator of the ratio comes from. rollout: the log-probs that were sampled with; the native "
        "engine gives the trainer's exactly. recompute: one more forward pass of the trainer over all decisions.",
    )
    max_log_prob_gap: float = flag(
        1e-6,
        at_least=0,
        help="Largest difference between the trainer's log-prob and the rollout's before the first update. The native "
        "engine gives 0; a larger gap than this stops the run.",
    )

    @property
    def samples_per_step(self) -> int:
        """Samples of one iteration, over all ranks."""
        return self.prompts_per_step * self.samples_per_prompt
