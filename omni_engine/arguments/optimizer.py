# SPDX-License-Identifier: Apache-2.0
"""Settings of AdamW and of the learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

from omni_engine.arguments.flag import flag


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer: AdamW, its learning-rate schedule and the micro-batch."""

    lr: float = flag(3e-5, above=0, source="Megatron", help="Highest learning rate.")
    min_lr: float = flag(0.0, at_least=0, source="Megatron", help="Learning rate at the end of the decay.")
    lr_decay_style: str = flag(
        "constant",
        choices=("constant", "linear", "cosine"),
        source="Megatron",
        help="Form of the decay after the warm-up.",
    )
    lr_decay_iters: int | None = flag(
        None,
        unit="iterations",
        at_least=1,
        source="Megatron",
        help="Iteration at which the decay reaches the lowest rate. Not given: --train-iters.",
    )
    lr_warmup_iters: int = flag(
        0,
        unit="iterations",
        at_least=0,
        source="Megatron",
        help="Iterations over which the rate rises linearly from 0.",
    )
    weight_decay: float = flag(1e-4, at_least=0, source="Megatron", help="Decoupled weight decay.")
    adam_beta1: float = flag(0.9, at_least=0, below=1, source="Megatron", help="Decay of Adam's first moment.")
    adam_beta2: float = flag(0.999, at_least=0, below=1, source="Megatron", help="Decay of Adam's second moment.")
    adam_eps: float = flag(1e-8, above=0, source="Megatron", help="Added to the root of Adam's second moment.")
    clip_grad: float = flag(
        1.0, at_least=0, source="Megatron", help="Largest global norm of the gradient. 0: gradients are not clipped."
    )
    micro_batch_size: int = flag(
        4, unit="samples", at_least=1, source="Megatron", help="Samples of one forward and backward pass on one rank."
    )
