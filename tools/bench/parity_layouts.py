# SPDX-License-Identifier: Apache-2.0
"""The layouts that must train as one process does, and the ways of training that each is tried with.

One table for the benchmark (parallel_parity.py) and for the tests (tests/distributed/test_layout_parity.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from omni_engine.arguments import AlgorithmSettings, LoraSettings, OptimizerSettings, ParallelSettings, RolloutSettings
from omni_engine.arguments.lora import ATTENTION_AND_MLP
from omni_engine.models.guidance import Guidance

BLOCKS = 4
"""Of the tiny model: one for each stage of PP4 and of PP2 x VPP2."""


@dataclass(frozen=True)
class Layout:
    """Settings, and the number of processes to run them with."""

    parallel: ParallelSettings
    processes: int


def layout(tp: int = 1, pp: int = 1, dp: int = 1, **others: Any) -> Layout:
    """A layout of `dp` replicas."""
    parallel = ParallelSettings(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **others)
    return Layout(parallel, parallel.model_parallel_size * dp)


OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "ddp_bucket_size": 5000}
# Buckets of one parameter: whatever a forward pass reads without its module being called is then seen to be stale.
OVERLAP_ALL = OVERLAP | {"overlap_param_gather": True, "use_distributed_optimizer": True, "ddp_bucket_size": 1}

LAYOUTS = {
    "ONE": layout(),
    "TP2": layout(tp=2),
    "TP2-SP": layout(tp=2, sequence_parallel=True),
    "PP2": layout(pp=2),
    "PP2-uneven": layout(pp=2, pipeline_layout=(3, 1)),
    "PP2xVPP2": layout(pp=2, num_virtual_stages_per_pipeline_rank=2),
    "U2": layout(ulysses_degree=2),
    "R2": layout(ring_degree=2),
    "R2-math": layout(ring_degree=2, ring_attention_kernel="math"),
    "DP2": layout(dp=2),
    "DP2-DO": layout(dp=2, use_distributed_optimizer=True),
    "DP2-overlap": layout(dp=2, **OVERLAP),
    "DP2-DO-overlap": layout(dp=2, **OVERLAP_ALL),
    "PP4": layout(pp=4),
    "U2xR2": layout(ulysses_degree=2, ring_degree=2),
    "TP2xU2": layout(tp=2, ulysses_degree=2),
    "TP2xR2-SP": layout(tp=2, ring_degree=2, sequence_parallel=True),
    "TP2xPP2-SP": layout(tp=2, pp=2, sequence_parallel=True),
    "PP2xU2": layout(pp=2, ulysses_degree=2),
    "PP2xVPP2xR2": layout(pp=2, ring_degree=2, num_virtual_stages_per_pipeline_rank=2),
    "DP2xTP2-SP-DO": layout(dp=2, tp=2, sequence_parallel=True, use_distributed_optimizer=True),
    "DP2xPP2": layout(dp=2, pp=2),
    "DP2xPP2xVPP2-DO-overlap": layout(dp=2, pp=2, num_virtual_stages_per_pipeline_rank=2, **OVERLAP_ALL),
    "DP2xU2-DO": layout(dp=2, ulysses_degree=2, use_distributed_optimizer=True),
}
"""Named after the sizes above 1; U Ulysses, R ring, SP sequence parallel, DO distributed optimizer."""

GUIDANCES = {"none": Guidance(1.0, "both"), "both": Guidance(3.0, "both"), "conditional": Guidance(3.0, "conditional")}
"""No guidance; guidance whose two branches are trained in one pass; guidance of which one branch is trained."""
RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True)
class Case:
    """A way of training: keys of the tables above, and `failed`: the places of samples without a reward."""

    guidance: str = "none"
    kl_coef: float = 0.0
    recompute: str = "none"
    bf16: bool = False
    failed: tuple[int, ...] = ()
    lora: LoraSettings = field(default_factory=LoraSettings)


PLAIN = {
    f"{guidance}-{recompute}": Case(guidance, kl_coef=0.0 if guidance == "none" else 0.5, recompute=recompute)
    for guidance in GUIDANCES
    for recompute in RECOMPUTES
}
"""All ways that only change how the same sums are made; guided ones also keep near a reference."""
# On every linear layer: sharded by column, by row, on the conditioning row, and not at all.
EMBEDDING_AND_HEAD = ("img_in", "txt_in", "linear_1", "linear_2", "norm_out.linear", "proj_out")
LORA = LoraSettings(
    lora_rank=4, lora_target_modules=(*ATTENTION_AND_MLP, "img_mod.1", "txt_mod.1", *EMBEDDING_AND_HEAD)
)
TRAINING = PLAIN | {
    # The last samples of the second update: under DP2 one replica has none to train on.
    "masked": Case(failed=(0, 6, 7)),
    "lora": Case(lora=LORA),
    "lora-both-full": Case("both", kl_coef=0.5, recompute="full", lora=LORA),
    "bf16": Case(bf16=True, recompute="full"),
}

# Eight samples, two updates of each set: four an update, so that PP4 is filled and DP2 has a micro-batch a stage.
ROLLOUT = RolloutSettings(prompts_per_step=4, samples_per_prompt=2, num_inference_steps=3, sde_window_range=(0, 2))
# The clip range is wide and the old log-probs lie off the policy's, so that ratios fall on both sides of its edges,
# none so near that rounding decides. The gradient clip is active. Adam's epsilon is of the size of the gradients: with
# a tiny one Adam's first step is the sign of the gradient, and where a gradient is small that sign is rounding, which
# belongs to the layout and not to the model.
ALGORITHM = AlgorithmSettings(clip_range=0.02, updates_per_rollout=2)
OPTIMIZER = OptimizerSettings(lr=0.01, adam_eps=1e-4, clip_grad=0.02, weight_decay=0.01, micro_batch_size=2)
ITERATIONS = 2
"""Of two updates each: two learning rates, four optimizer steps."""


@dataclass(frozen=True)
class Sampling:
    """A way of sampling; `replayed`: by the trainer, which must find the same log-probs to the last bit."""

    guidance: str = "none"
    sde_type: str = "sde"
    bf16: bool = False


SAMPLING = {
    f"rollout-{guidance}-{sde_type}": Sampling(guidance, sde_type)
    for guidance in GUIDANCES
    for sde_type in ("sde", "cps", "dance_sde")
} | {"rollout-conditional-sde-bf16": Sampling("conditional", bf16=True)}


def rollout_settings(sampling: Sampling) -> RolloutSettings:
    """Those of the table above with another kind of step."""
    return replace(ROLLOUT, sde_type=sampling.sde_type)
