# SPDX-License-Identifier: Apache-2.0
"""Settings of the training loop."""

from __future__ import annotations

from dataclasses import dataclass

from omni_engine.arguments.flag import flag


@dataclass(frozen=True)
class TrainingSettings:
    """Training: how long, with which seed, and how often it is evaluated."""

    train_iters: int = flag(
        100,
        unit="iterations",
        at_least=1,
        source="Megatron",
        help="Iterations to train for. One iteration is one rollout with its updates.",
    )
    seed: int = flag(
        1234,
        at_least=0,
        below=2**63,
        source="Megatron",
        help="Seed of the prompt order, the windows and the noise. It fixes the run.",
    )
    eval_interval: int = flag(
        20,
        unit="iterations",
        at_least=0,
        source="Megatron",
        help="With --eval-prompts: evaluate before the first iteration and after every so many. 0: never.",
    )
