# SPDX-License-Identifier: Apache-2.0
"""Run by test_layout_parity.py under torchrun: trains and samples a tiny model under each of several layouts.

    layout_worker.py FOLDER LAYOUT=CASE,CASE ...

FOLDER holds the model; the samples to train on are made by the first launch, in one process. What a rank ends with
goes to FOLDER/LAYOUT/CASE.RANK.safetensors, for the test to put together: this file gathers nothing by the engine's
own means, so a fault of those cannot hide here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from omni_engine.arguments import AlgorithmSettings, OptimizerSettings, ParallelSettings, RolloutSettings
from omni_engine.flow import FlowSegment, Samples, log_prob_convention
from omni_engine.models.guidance import Guidance
from omni_engine.parallel import ParallelGroups, destroy, initialize, leave_layout
from omni_engine.reward import Reward, RewardPool
from omni_engine.rollout import IterationPlan, RolloutChunk
from omni_engine.training.optimizer import StepResult
from omni_engine.training.scoring import RewardCollector
from tests.engine_parts import Engine, Setup, build_engine

UNSCORED = 3
"""The sample whose picture cannot be scored."""
ITERATIONS = 3
"""Of two updates each, so three learning-rate steps and six optimizer steps."""
GUIDANCES = {"none": Guidance(1.0, "both"), "both": Guidance(3.0, "both"), "conditional": Guidance(3.0, "conditional")}
ROLLOUT = RolloutSettings(prompts_per_step=8, samples_per_prompt=2, num_inference_steps=4, sde_window_range=(0, 2))
# The clip range is wide and the old log-probs lie off the policy's, so that ratios fall on both sides of its edges,
# none so near that rounding decides. The gradient clip is active. Adam's epsilon is of the size of the gradients: with
# a tiny one Adam's first step is the sign of the gradient, and where a gradient is small that sign is rounding, which
# belongs to the layout and not to the model.
ALGORITHM = AlgorithmSettings(clip_range=0.02, updates_per_rollout=2)
OPTIMIZER = OptimizerSettings(lr=0.01, adam_eps=1e-4, clip_grad=0.02, weight_decay=0.01, micro_batch_size=4)


def layout(tp: int = 1, pp: int = 1, **others: Any) -> ParallelSettings:
    return ParallelSettings(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **others)


LAYOUTS = {
    "ONE": layout(),
    "TP2": layout(tp=2),
    "TP2-SP": layout(tp=2, sequence_parallel=True),
    "PP2": layout(pp=2),
    "PP2xVPP2": layout(pp=2, num_virtual_stages_per_pipeline_rank=2),
    "PP2-uneven": layout(pp=2, pipeline_layout=(3, 1)),
    "U2": layout(ulysses_degree=2),
    "R2": layout(ring_degree=2),
    "R2-math": layout(ring_degree=2, ring_attention_kernel="math"),
    "DP2": layout(),
    "DP2-DO": layout(use_distributed_optimizer=True),
    "PP4": layout(pp=4),
    "U2xR2": layout(ulysses_degree=2, ring_degree=2),
    "TP2xU2": layout(tp=2, ulysses_degree=2),
    "TP2xR2-SP": layout(tp=2, ring_degree=2, sequence_parallel=True),
    "PP2xU2": layout(pp=2, ulysses_degree=2),
    "PP2xVPP2xR2": layout(pp=2, ring_degree=2, num_virtual_stages_per_pipeline_rank=2),
    "DP2xU2-DO": layout(ulysses_degree=2, use_distributed_optimizer=True),
    "TP2xPP2-SP": layout(tp=2, pp=2, sequence_parallel=True),
    "DP2xTP2-SP-DO": layout(tp=2, sequence_parallel=True, use_distributed_optimizer=True),
    "DP2xPP2": layout(pp=2),
}


@dataclass(frozen=True)
class Case:
    guidance: str = "none"
    kl_coef: float = 0.0
    recompute: str = "none"
    bf16: bool = False
    failed: tuple[int, ...] = ()


TRAINING = {
    "plain": Case(),
    "both": Case("both", kl_coef=0.5, recompute="full"),
    "conditional": Case("conditional", kl_coef=0.5),
    # The last samples of the second update: under DP2 one replica has none to train on.
    "masked": Case(failed=(0, 5, 12, 13, 14, 15)),
    "bf16": Case(bf16=True, recompute="full"),
}
ROLLOUTS = {
    f"rollout-{guidance}-{sde_type}": (guidance, sde_type, False)
    for guidance in GUIDANCES
    for sde_type in ("sde", "cps", "dance_sde")
} | {"rollout-conditional-sde-bf16": ("conditional", "sde", True)}


def main(folder: Path, wanted: Mapping[str, list[str]]) -> None:
    """Run the cases of each layout, one layout after the other."""
    for name, cases in wanted.items():
        layout = LAYOUTS[name]
        groups = initialize(layout, seed=0)
        (folder / name).mkdir(exist_ok=True)
        for case in cases:
            torch.manual_seed(1000 + groups.rank)
            run = run_rollout if case in ROLLOUTS else run_training
            tensors, figures = run(folder, groups, layout, case)
            place = {"tp": groups.tp_rank, "cp": groups.cp_rank, "pp": groups.pp_rank, "dp": groups.dp_rank}
            save_file(
                {key: value.contiguous() for key, value in tensors.items()},
                folder / name / f"{case}.{groups.rank}.safetensors",
                metadata={"figures": json.dumps(figures | place)},
            )
        leave_layout()


def setup_of(layout: ParallelSettings, case: Case, sde_type: str = "sde") -> Setup:
    return Setup(
        guidance=GUIDANCES[case.guidance],
        rollout=replace(ROLLOUT, sde_type=sde_type),
        algorithm=replace(ALGORITHM, kl_coef=case.kl_coef),
        optimizer=OPTIMIZER,
        parallel=layout,
        recompute=case.recompute,
        bf16=case.bf16,
        max_log_prob_gap=1.0,
    )


def run_training(
    folder: Path, groups: ParallelGroups, layout: ParallelSettings, name: str
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Three iterations on the stored samples: metrics of each, the first gradient, the weights before and after."""
    case = TRAINING[name]
    engine = build_engine(folder, groups, setup_of(layout, case))
    tensors = named("before", engine, engine.weights())
    first: dict[str, torch.Tensor] = {}
    step = engine.optimizer.step

    def recording_step() -> StepResult:
        if not first:
            first.update(named("gradient", engine, reduced_gradients(engine)))
        return step()

    engine.optimizer.step = recording_step  # type: ignore[method-assign]
    figures: dict[str, float] = {}
    stored = stored_samples(folder, engine)
    for iteration in range(ITERATIONS):
        samples = replace(stored, weight_version=engine.policy.version)
        scored = replace(engine.scored(iteration, case.failed), local=stored.ids)
        metrics = engine.updater.run(samples, scored)
        figures |= {f"{iteration}/{key}": value for key, value in metrics.items()}
    return tensors | first | named("after", engine, engine.weights()), figures


def run_rollout(
    folder: Path, groups: ParallelGroups, layout: ParallelSettings, name: str
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """One iteration sampled by the policy, replayed by the trainer with a limit of zero on the gap, and scored."""
    guidance, sde_type, bf16 = ROLLOUTS[name]
    setup = replace(setup_of(layout, Case(guidance, bf16=bf16), sde_type), max_log_prob_gap=0.0)
    engine = build_engine(folder, groups, setup)
    samples = engine.sample()
    segment = samples.segments["image"]
    metrics = engine.updater.run(samples, engine.scored())
    return {
        "ids": samples.ids,
        "x_t": segment.x_t,
        "x_next": segment.x_next,
        "log_prob": segment.log_prob,
        **collected_rewards(samples, groups),
    }, metrics


class NumberPool:
    """The reward of a picture is its first pixel; one of them cannot be scored."""

    def submit(self, images: np.ndarray, prompts: list[str]) -> NumberPool:
        self.values = [float(image[0, 0, 0]) for image in images]
        return self

    def result(self) -> list[Reward]:
        return [Reward(None if value == UNSCORED else value) for value in self.values]


def collected_rewards(samples: Samples, groups: ParallelGroups) -> dict[str, torch.Tensor]:
    """What every rank is told of the rewards when each sample's picture shows its id."""
    pool = NumberPool() if groups.is_model_source else None
    collector = RewardCollector(cast("RewardPool | None", pool), groups)
    images = samples.ids.numpy().astype(np.uint8)[:, None, None, None].repeat(3, -1) if pool is not None else None
    collector.submit(RolloutChunk(samples, images))
    scored = collector.collect(samples.ids, samples.groups)
    return {"rewards": scored.rewards, "valid": scored.valid, "local": scored.local, "groups": scored.groups}


def reduced_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """This rank's gradients; under the distributed optimizer each replica has reduced a part, so they are exchanged."""
    groups = engine.groups
    if engine.setup.parallel.use_distributed_optimizer:
        for buffer in (buffer for chunk in engine.optimizer.ddp for buffer in chunk.buffers):
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(groups.dp_cp.size())[groups.dp_cp_rank].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=groups.dp_cp)
    return engine.gradients()


def stored_samples(folder: Path, engine: Engine) -> Samples:
    """This rank's share of one set of samples, the same for every layout."""
    file, plan = folder / "samples.safetensors", engine.plan()
    if not file.exists():
        make_samples(file, engine)
    stored = load_file(file)
    segment = FlowSegment(
        modality="image",
        expert="transformer",
        schedule=engine.schedule,
        sde_type="sde",
        noise_level=engine.setup.rollout.noise_level,
        guidance_scale=engine.setup.guidance.scale,
        convention=log_prob_convention("sde"),
        steps=plan.window,
        **{name: stored[name][plan.ids] for name in ("x_t", "x_next", "log_prob")},
    )
    return samples_of(plan, segment)


def make_samples(file: Path, engine: Engine) -> None:
    """All samples of an iteration in the order of their ids, with old log-probs off the policy's own."""
    samples = engine.sample()
    segment = samples.segments["image"]
    generator = torch.Generator().manual_seed(3)
    offset = 0.1 * (torch.rand(segment.log_prob.shape, dtype=torch.float64, generator=generator) - 0.5)
    order = samples.ids.argsort()
    stored = {"x_t": segment.x_t, "x_next": segment.x_next, "log_prob": segment.log_prob + offset}
    save_file({name: value[order].contiguous() for name, value in stored.items()}, file)


def samples_of(plan: IterationPlan, segment: FlowSegment) -> Samples:
    return Samples(
        ids=plan.ids,
        groups=plan.groups,
        prompts=plan.prompts,
        prompt_of=plan.prompt_of,
        weight_version=0,
        segments={"image": segment},
    )


def named(kind: str, engine: Engine, local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A rank's tensors under `kind/dim by which they are sharded/Hugging Face name`."""
    out = {}
    for path, value in local.items():
        entry = engine.family.mapping.entries[path]
        for source, piece in zip(entry.sources, entry.split(value), strict=True):
            out[f"{kind}/{entry.shard_dim}/{source}"] = piece.float().clone()
    return out


if __name__ == "__main__":
    main(Path(sys.argv[1]), {layout: cases.split(",") for layout, cases in (a.split("=") for a in sys.argv[2:])})
    destroy()
