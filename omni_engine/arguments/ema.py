# SPDX-License-Identifier: Apache-2.0
"""Settings of the moving average of the trained weights."""

from __future__ import annotations

from dataclasses import dataclass

from omni_engine.arguments.flag import flag

WEIGHTS = ("policy", "ema")


@dataclass(frozen=True)
class EmaSettings:
    """EMA: an exponential moving average of the trained weights, beside them."""

    ema_decay: float = flag(
        0.0,
        at_least=0,
        below=1,
        source="flow_grpo",
        help="Highest decay of a float32 moving average of the trained weights; flow_grpo has 0.9, every 8 updates. "
        "After n optimizer steps the decay is at most n / (9 + n). 0: no average is kept.",
    )
    ema_interval: int = flag(
        8, unit="updates", at_least=1, source="flow_grpo", help="Optimizer updates between two updates of the average."
    )
    eval_weights: str = flag(
        "policy", choices=WEIGHTS, help="Weights that evaluations use: the trained ones, or their average."
    )
    export_weights: str = flag(
        "policy", choices=WEIGHTS, help="Weights that --export-hf writes: the trained ones, or their average."
    )
