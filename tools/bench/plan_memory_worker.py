# SPDX-License-Identifier: Apache-2.0
"""Run by plan_memory.py under torchrun: one iteration of a policy with full-width blocks, its peak of resident memory.

plan_memory_worker.py MODEL LAYOUT RECOMPUTE FOLDER writes FOLDER/rankN.json.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
import torch.distributed as dist

import omni_engine  # noqa: F401 - prepares megatron.core's import
from omni_engine.algorithms import build_algorithm
from omni_engine.arguments import (
    AlgorithmSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RolloutSettings,
)
from omni_engine.flow import Samples
from omni_engine.models import build_family
from omni_engine.models.costs import Layout, Memory, MemoryModel, Training
from omni_engine.models.guidance import Guidance
from omni_engine.models.policy import Policy
from omni_engine.parallel import ParallelGroups, destroy, initialize
from omni_engine.platform import get_platform
from omni_engine.rollout import NativeRollout, PromptEncoder, RolloutRequest, plan_iteration
from omni_engine.training.logging import PhaseTimers
from omni_engine.training.optimizer import PolicyOptimizer
from omni_engine.training.scoring import ScoredBatch
from omni_engine.training.update import Updater, UpdateRules

LAYOUTS = {
    "one": ParallelSettings(),
    "TP2": ParallelSettings(tensor_model_parallel_size=2),
    "PP2": ParallelSettings(pipeline_model_parallel_size=2),
    "DP2": ParallelSettings(use_distributed_optimizer=True),
}
PIXELS = (256, 256)
TEXT_TOKENS = 64
MICRO_BATCH = 4
ROLLOUT = RolloutSettings(
    prompts_per_step=2, samples_per_prompt=4, num_inference_steps=2, sde_window_size=1, sde_window_range=(0, 1)
)
GUIDANCE = Guidance(1.0, "both")


class RandomComponents:
    """Every prompt has embeddings of one length; pictures are black."""

    def __init__(self, features: int):
        self.features = features

    def encode(self, prompts: Sequence[str]) -> list[torch.Tensor]:
        return [torch.randn(TEXT_TOKENS, self.features) for _ in prompts]

    def decode(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return torch.zeros(len(latents), height, width, 3, dtype=torch.uint8)


def main(folder: Path, name: str, recompute: str, target: Path) -> None:
    parallel = LAYOUTS[name]
    groups = initialize(parallel, seed=0)
    warm_up(groups)
    before = resident()
    height, width = PIXELS
    family = build_family("qwen_image", folder)
    model = ModelSettings(model=str(folder), height=height, width=width, recompute_granularity=recompute)
    policy = Policy(family, groups, model, parallel)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.normal_(std=0.02)
            dist.broadcast(parameter, dist.get_process_group_ranks(groups.dp)[0], group=groups.dp)
    optimizer = PolicyOptimizer(policy, OptimizerSettings(lr=1e-7), parallel, train_iters=10)
    optimizer.zero_grad()
    optimizer.step()  # the optimizer's state exists from its first step on

    encoder = PromptEncoder(
        RandomComponents(family.text_features) if groups.is_model_source else None, groups, ROLLOUT.negative_prompt
    )
    rules = UpdateRules(updates=1, micro_batch_size=MICRO_BATCH, kl_variance="transition", max_log_prob_gap=1.0)
    algorithm, timers = (
        build_algorithm(AlgorithmSettings(updates_per_rollout=1)),
        PhaseTimers(get_platform().synchronize),
    )
    updater = Updater(policy, optimizer, algorithm, encoder, GUIDANCE, rules, None, timers)
    rollout = NativeRollout(policy, encoder, encoder.components, height, width)

    reset_peak()
    iteration(groups, policy, rollout, updater)
    measured = peak() - before
    planned = plan(policy, parallel, recompute)
    row = {
        "layout": name,
        "recompute": recompute,
        "rank": groups.rank,
        "measured_bytes": measured,
        "planned_bytes": round(planned.total),
        "planned_over_measured": planned.total / measured,
        "planned": {field.name: round(getattr(planned, field.name)) for field in fields(planned)},
    }
    (target / f"rank{groups.rank}.json").write_text(json.dumps(row))
    dist.barrier()
    destroy()


def iteration(groups: ParallelGroups, policy: Policy, rollout: NativeRollout, updater: Updater) -> None:
    """Sample and train, as `training/loop.py` does."""
    plan = plan_iteration(0, ["a", "b"], 1, ROLLOUT, 0, groups)
    request = RolloutRequest(
        ids=plan.ids,
        groups=plan.groups,
        prompts=plan.prompts,
        prompt_of=plan.prompt_of,
        seed=0,
        schedule=policy.family.schedule(ROLLOUT.num_inference_steps, *PIXELS),
        sde_type=ROLLOUT.sde_type,
        noise_level=ROLLOUT.noise_level,
        window=plan.window,
        guidance=GUIDANCE,
        micro_batch_size=MICRO_BATCH,
    )
    rollout.update_weights(policy.version)
    samples = Samples.cat([chunk.samples for chunk in rollout.generate(request)])
    count = ROLLOUT.samples_per_step
    scored = ScoredBatch(
        rewards=torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        groups=torch.arange(ROLLOUT.prompts_per_step).repeat_interleave(ROLLOUT.samples_per_prompt),
        valid=torch.ones(count, dtype=torch.bool),
        local=plan.ids,
    )
    updater.run(samples, scored)


def plan(policy: Policy, parallel: ParallelSettings, recompute: str) -> Memory:
    """The planner's figure for this rank. Samples and texts are counted as the rank holds them."""
    groups = policy.groups
    layout = Layout(parallel, groups.dp_size)
    spec = policy.family.costs(policy.shape.tokens, TEXT_TOKENS)
    own = ROLLOUT.samples_per_step // groups.dp_size
    training = Training(
        bf16=False,
        recompute=recompute,
        passes=MICRO_BATCH,
        rollout_passes=MICRO_BATCH,
        micro_batches=own // MICRO_BATCH,
        step="each",
        copied=True,
    )
    latents = 2 * 4 * own * policy.shape.tokens * policy.shape.channels
    texts = 4 * ROLLOUT.prompts_per_step * TEXT_TOKENS * policy.family.text_features
    return replace(MemoryModel(spec, layout, training).of_rank(groups.pp_rank), samples=latents + texts)


def warm_up(groups: ParallelGroups) -> None:
    """Have threads, kernels and connections set up before anything is measured."""
    x = torch.randn(256, 256, requires_grad=True)
    (x @ x).sum().backward()
    query = torch.randn(1, 2, 64, 64, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    for group in (groups.tp, groups.pp, groups.dp):
        dist.all_reduce(torch.ones(1024), group=group)


def resident() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def reset_peak() -> None:
    """Let the system forget the peak of resident memory so far (Linux, see proc(5) on clear_refs)."""
    resident()
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Most bytes that were in memory since `reset_peak`."""
    return _status("VmHWM")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
