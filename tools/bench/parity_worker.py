# SPDX-License-Identifier: Apache-2.0
"""Run under torchrun: trains and samples a tiny model under each of several layouts of as many processes.

    parity_worker.py FOLDER LAYOUT=CASE,CASE ...

FOLDER holds the model; the samples to train on are made by the first launch, in one process. What a rank ends with
goes to FOLDER/LAYOUT/CASE.RANK.safetensors, for tools/bench/parity.py to put together: this file gathers nothing by
the engine's own means, so a fault of those cannot hide here.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from omni_engine.algorithms import DecisionStats
from omni_engine.algorithms.base import LossOutput
from omni_engine.flow import FlowSegment, Samples, log_prob_convention
from omni_engine.parallel import ParallelGroups, destroy, initialize, leave_layout
from omni_engine.reward import Reward, RewardPool
from omni_engine.rollout import IterationPlan, RolloutChunk, native
from omni_engine.training.optimizer import StepResult
from omni_engine.training.scoring import RewardCollector
from tools.bench.parity_layouts import (
    ALGORITHM,
    GUIDANCES,
    ITERATIONS,
    LAYOUTS,
    OPTIMIZER,
    SAMPLING,
    TRAINING,
    Case,
    Layout,
    Sampling,
    rollout_settings,
)
from tools.bench.tiny_engine import Engine, Setup, build_engine

Tensors = dict[str, torch.Tensor]
UNSCORED = 3
"""The sample whose picture cannot be scored."""


def main(folder: Path, wanted: Mapping[str, list[str]]) -> None:
    """Run the cases of each layout, one layout after the other."""
    for name, cases in wanted.items():
        layout = LAYOUTS[name]
        groups = initialize(layout.parallel, seed=0)
        assert groups.world_size == layout.processes, f"{name} needs {layout.processes} processes"
        (folder / name).mkdir(exist_ok=True)
        for case in cases:
            torch.manual_seed(1000 + groups.rank)
            if case in SAMPLING:
                tensors, figures = run_rollout(folder, groups, layout, SAMPLING[case])
            else:
                tensors, figures = run_training(folder, groups, layout, TRAINING[case])
            place = {"tp": groups.tp_rank, "cp": groups.cp_rank, "pp": groups.pp_rank, "dp": groups.dp_rank}
            save_file(
                {key: value.contiguous() for key, value in tensors.items()},
                folder / name / f"{case}.{groups.rank}.safetensors",
                metadata={"figures": json.dumps(figures), "place": json.dumps(place)},
            )
        leave_layout()


def setup_of(layout: Layout, case: Case, sampling: Sampling | None = None) -> Setup:
    """The engine of a case; samples that are trained on have a log-prob gap, by design."""
    return Setup(
        guidance=GUIDANCES[case.guidance],
        rollout=rollout_settings(sampling or Sampling()),
        algorithm=replace(ALGORITHM, kl_coef=case.kl_coef),
        optimizer=OPTIMIZER,
        parallel=layout.parallel,
        recompute=case.recompute,
        bf16=case.bf16,
        lora=case.lora,
        max_log_prob_gap=1.0,
    )


def run_training(folder: Path, groups: ParallelGroups, layout: Layout, case: Case) -> tuple[Tensors, dict[str, float]]:
    """Iterations on the stored samples: metrics of each, every decision, the first gradient, the weights before and
    after."""
    engine = build_engine(folder, groups, setup_of(layout, case))
    fill_adapters(engine)
    recorder = DecisionRecorder(engine)
    tensors = named("before", engine, engine.weights())
    first: Tensors = {}
    step = engine.optimizer.step

    def recording_step() -> StepResult:
        if not first:
            first.update(named("gradient", engine, reduced_gradients(engine)))
        recorder.update += 1
        return step()

    engine.optimizer.step = recording_step  # type: ignore[method-assign]
    figures: dict[str, float] = {}
    stored = stored_samples(folder, engine)
    for iteration in range(ITERATIONS):
        samples = replace(stored, weight_version=engine.policy.version)
        scored = replace(engine.scored(iteration, case.failed), local=stored.ids)
        metrics = engine.updater.run(samples, scored)
        figures |= {f"{iteration}/{key}": value for key, value in metrics.items()}
    return tensors | first | recorder.tensors() | named("after", engine, engine.weights()), figures


@torch.no_grad()
def fill_adapters(engine: Engine) -> None:
    """Give every B of an adapter numbers of its own: with the zeros that it starts with, A has no gradient."""
    groups, rank = engine.groups, engine.setup.lora.lora_rank
    for path, parameter in engine.policy.adapters().items():
        entry = engine.policy.mapping.entries[path]
        for name, piece in zip(entry.sources, entry.split(parameter), strict=True):
            if "lora_B" in name:
                shards = groups.tp_size if entry.shard_dim == 0 else 1
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                whole = 0.02 * torch.randn(len(piece) * shards, rank, generator=generator)
                piece.copy_(whole.chunk(shards)[groups.tp_rank if shards > 1 else 0])


class DecisionRecorder:
    """Listens to the algorithm's loss, which a last stage calls for each micro-batch: the log-prob of every decision,
    and what that decision alone adds to the loss."""

    def __init__(self, engine: Engine):
        self.update = 0
        self.rows: list[torch.Tensor] = []
        self.loss = engine.algorithm.loss
        engine.algorithm.loss = self.recording_loss  # type: ignore[method-assign]

    def recording_loss(self, stats: DecisionStats, global_count: float) -> LossOutput:
        assert stats.sample_ids is not None
        for index, sample in enumerate(stats.sample_ids.tolist()):
            one = slice(index, index + 1)
            alone = DecisionStats(
                log_prob=stats.log_prob[one].detach(),
                old_log_prob=stats.old_log_prob[one],
                advantages=stats.advantages[one],
                weights=stats.weights[one],
                kl=None if stats.kl is None else stats.kl[one].detach(),
            )
            share = float(self.loss(alone, global_count).loss)
            row = [self.update, sample, float(alone.log_prob), share]
            self.rows.append(torch.tensor(row, dtype=torch.float64))
        return self.loss(stats, global_count)

    def tensors(self) -> Tensors:
        """float64 [decisions, 4]: update, sample, log-prob, share of the loss; nothing on earlier stages."""
        return {"decisions": torch.stack(self.rows)} if self.rows else {}


def run_rollout(
    folder: Path, groups: ParallelGroups, layout: Layout, sampling: Sampling
) -> tuple[Tensors, dict[str, float]]:
    """An iteration sampled by the policy, replayed by the trainer with a limit of zero on the gap, and scored; then
    the next one sampled."""
    case = Case(sampling.guidance, bf16=sampling.bf16)
    engine = build_engine(folder, groups, replace(setup_of(layout, case, sampling), max_log_prob_gap=0.0))
    with recorded_noise() as noise:
        samples = engine.sample()
    segment = samples.segments["image"]
    metrics = engine.updater.run(samples, engine.scored())
    with recorded_noise() as later:
        engine.sample(iteration=1)
    return {
        "ids": samples.ids,
        "x_t": segment.x_t,
        "x_next": segment.x_next,
        "log_prob": segment.log_prob,
        **collected_rewards(samples, groups),
        **noise,
        **later,
    }, metrics


@contextmanager
def recorded_noise() -> Iterator[Tensors]:
    """What the rollout draws meanwhile: `noise/stream/step/sample`, float32 [elements]."""
    drawn: Tensors = {}
    draw = native.philox_normal

    def recording(seed: int, ids: torch.Tensor, step: int, stream: int, elements: int) -> torch.Tensor:
        values = draw(seed, ids, step, stream, elements)
        for sample, row in zip(ids.tolist(), values, strict=True):
            drawn[f"noise/{int(stream)}/{step}/{sample}"] = row.clone()
        return values

    with patch.object(native, "philox_normal", recording):
        yield drawn


class NumberPool:
    """The reward of a picture is its first pixel; one of them cannot be scored."""

    def submit(self, images: np.ndarray, prompts: list[str]) -> NumberPool:
        self.values = [float(image[0, 0, 0]) for image in images]
        return self

    def result(self) -> list[Reward]:
        return [Reward(None if value == UNSCORED else value) for value in self.values]


def collected_rewards(samples: Samples, groups: ParallelGroups) -> Tensors:
    """What every rank is told of the rewards when each sample's picture shows its id."""
    pool = NumberPool() if groups.is_model_source else None
    collector = RewardCollector(cast("RewardPool | None", pool), groups)
    images = samples.ids.numpy().astype(np.uint8)[:, None, None, None].repeat(3, -1) if pool is not None else None
    collector.submit(RolloutChunk(samples, images))
    scored = collector.collect(samples.ids, samples.groups)
    return {"rewards": scored.rewards, "valid": scored.valid, "local": scored.local, "groups": scored.groups}


def reduced_gradients(engine: Engine) -> Tensors:
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


def named(kind: str, engine: Engine, local: Mapping[str, torch.Tensor]) -> Tensors:
    """A rank's tensors under `kind/dim by which they are sharded/Hugging Face name`."""
    out = {}
    for path, value in local.items():
        entry = engine.policy.mapping.entries[path]
        for source, piece in zip(entry.sources, entry.split(value), strict=True):
            out[f"{kind}/{entry.shard_dim}/{source}"] = piece.float().clone()
    return out


if __name__ == "__main__":
    main(Path(sys.argv[1]), {layout: cases.split(",") for layout, cases in (a.split("=") for a in sys.argv[2:])})
    destroy()
