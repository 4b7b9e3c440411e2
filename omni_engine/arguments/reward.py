# SPDX-License-Identifier: Apache-2.0
"""Settings of the rewards and of the processes that compute them."""

from __future__ import annotations

from dataclasses import dataclass

from omni_engine.arguments.flag import flag


@dataclass(frozen=True)
class RewardSettings:
    """Reward: which scorers, their weights, and how they are run."""

    reward: tuple[str, ...] = flag(("ocr",), nargs="+", help="Scorers whose weighted sum is the reward.")
    reward_weights: tuple[float, ...] = flag((1.0,), nargs="+", help="Weight of each scorer, in the order of --reward.")
    eval_reward: tuple[str, ...] = flag(
        (), nargs="*", help="Further scorers that are only reported by evaluations and never trained on."
    )
    reward_workers: int = flag(1, unit="processes", at_least=1, help="Scorer processes of each model replica.")
    reward_timeout: float = flag(
        60.0, unit="seconds", above=0, help="A batch that takes a scorer longer than this has failed."
    )
    reward_retries: int = flag(
        1,
        unit="tries",
        at_least=0,
        help="Further tries for a failed score. After them the sample is masked and counted.",
    )
