# SPDX-License-Identifier: Apache-2.0
"""Settings of the policy-gradient algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from omni_engine.arguments.flag import flag


@dataclass(frozen=True)
class AlgorithmSettings:
    """Algorithm: advantages, loss and how often a rollout is used."""

    algorithm: str = flag("flow_grpo", choices=("flow_grpo",), help="Reinforcement-learning algorithm.")
    clip_range: float = flag(
        1e-4,
        above=0,
        below=1,
        source="flow_grpo",
        help="The probability ratio counts inside [1 - clip, 1 + clip]. The log-prob is a mean over latent elements, "
        "so a useful range shrinks about as 1/sqrt(elements): 1e-4 at 512 elements, 1e-5 at 65,536.",
    )
    advantage_std: str = flag(
        "batch",
        choices=("batch", "group", "none"),
        help="Standard deviation that the advantage is divided by: of the whole iteration, of the prompt's group, or "
        "none.",
    )
    advantage_std_unbiased: bool = flag(
        True, help="Divide the variance by n - 1 (as torch.std does) rather than by n (as numpy.std does)."
    )
    advantage_epsilon: float = flag(1e-4, at_least=0, source="flow_grpo", help="Added to the standard deviation.")
    advantage_std_floor: float = flag(
        0.0,
        at_least=0,
        help="A standard deviation below this counts as no spread at all: those samples get advantage 0.",
    )
    advantage_clip: float = flag(5.0, above=0, source="flow_grpo", help="Advantages are clamped to [-clip, clip].")
    kl_coef: float = flag(
        0.0, at_least=0, help="Weight of the KL term against the model as loaded. 0: no reference model is held."
    )
    kl_variance: str = flag(
        "transition",
        choices=("transition", "flow_grpo"),
        help="Variance that the KL term divides by: of the step taken (the exact KL of the two steps), or flow_grpo's "
        "std_dev_t squared, which leaves out the step length.",
    )
    updates_per_rollout: int = flag(
        2,
        unit="updates",
        at_least=1,
        help="Optimizer updates of an iteration. Each takes an equal part of its prompts.",
    )
