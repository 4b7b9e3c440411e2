# SPDX-License-Identifier: Apache-2.0
"""A whole engine on a tiny model, for tests of its parts: policy, optimizer, rollout and updater, put together by hand.

Import `omni_engine` before megatron.core, as ever; this module does.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import omni_engine  # noqa: F401 - prepares megatron.core's import
from omni_engine.algorithms import Algorithm, build_algorithm
from omni_engine.arguments import (
    AlgorithmSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RolloutSettings,
)
from omni_engine.checkpoint.huggingface import load_transformer
from omni_engine.flow import FlowSegment, Samples, Schedule
from omni_engine.models import Family, build_family
from omni_engine.models.adapters import initialize_adapters
from omni_engine.models.guidance import Guidance
from omni_engine.models.policy import Policy
from omni_engine.parallel import ParallelGroups
from omni_engine.platform import get_platform
from omni_engine.rollout import IterationPlan, NativeRollout, PromptEncoder, RolloutRequest, plan_iteration
from omni_engine.training.logging import PhaseTimers
from omni_engine.training.optimizer import PolicyOptimizer
from omni_engine.training.reference import reference_of
from omni_engine.training.scoring import ScoredBatch
from omni_engine.training.update import Updater, UpdateRules
from tools.bench.tiny_model import make_transformer, save_folder

TEXT_DIM = 24
PIXELS = (24, 32)
"""Height and width: a grid of 1 x 3 x 4 patches, so one side is odd."""


def make_folder(path: Path, layers: int) -> Path:
    """A folder with a random transformer of head size 16 and 4 heads."""
    return save_folder(make_transformer(layers=layers, text_dim=TEXT_DIM), path)


class ToyComponents:
    """A prompt of n characters has n random text embeddings of its own; every picture is black."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, prompts: Sequence[str]) -> list[torch.Tensor]:
        """One [T, E] a prompt."""
        self.encoded += prompts
        rows = []
        for prompt in prompts:
            generator = torch.Generator().manual_seed(zlib.crc32(prompt.encode()))
            rows.append(torch.randn(len(prompt), TEXT_DIM, generator=generator).to(get_platform().device()))
        return rows

    def decode(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """uint8 [B, height, width, 3]."""
        return torch.zeros(len(latents), height, width, 3, dtype=torch.uint8)


@dataclass(frozen=True)
class Setup:
    """What a test may want to change of the engine."""

    guidance: Guidance = field(default_factory=lambda: Guidance(1.0, "both"))
    rollout: RolloutSettings = field(
        default_factory=lambda: RolloutSettings(
            prompts_per_step=4, samples_per_prompt=2, num_inference_steps=4, sde_window_range=(0, 2)
        )
    )
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    optimizer: OptimizerSettings = field(
        default_factory=lambda: OptimizerSettings(lr=1e-3, clip_grad=0.0, weight_decay=0.0, micro_batch_size=2)
    )
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    recompute: str = "none"
    bf16: bool = False
    max_log_prob_gap: float = 0.0
    seed: int = 7


@dataclass
class Engine:
    """The parts, as a run holds them, without scorers, logs and checkpoints."""

    setup: Setup
    groups: ParallelGroups
    family: Family
    policy: Policy
    algorithm: Algorithm
    optimizer: PolicyOptimizer
    encoder: PromptEncoder
    rollout: NativeRollout
    updater: Updater
    schedule: Schedule

    def plan(self, iteration: int = 0) -> IterationPlan:
        """This rank's share; the prompts' lengths differ, so that text is masked in every micro-batch."""
        prompts = [f"{'abcdefg'[: 2 + (3 * slot) % 5]}{slot}" for slot in range(self.setup.rollout.prompts_per_step)]
        updates = self.setup.algorithm.updates_per_rollout
        return plan_iteration(iteration, prompts, updates, self.setup.rollout, self.setup.seed, self.groups)

    def request(self, plan: IterationPlan) -> RolloutRequest:
        """The rollout of a plan with the window at the first steps: step 0 is where sigma is 1."""
        return RolloutRequest(
            ids=plan.ids,
            groups=plan.groups,
            prompts=plan.prompts,
            prompt_of=plan.prompt_of,
            seed=self.setup.seed,
            schedule=self.schedule,
            sde_type=self.setup.rollout.sde_type,
            noise_level=self.setup.rollout.noise_level,
            window=plan.window,
            guidance=self.setup.guidance,
            micro_batch_size=self.setup.optimizer.micro_batch_size,
        )

    def sample(self, iteration: int = 0) -> Samples:
        """This rank's samples of an iteration."""
        self.rollout.update_weights(self.policy.version)
        return Samples.cat([chunk.samples for chunk in self.rollout.generate(self.request(self.plan(iteration)))])

    def scored(self, iteration: int = 0, failed: Sequence[int] = ()) -> ScoredBatch:
        """Random rewards of all samples of an iteration; `failed` are positions without one."""
        settings, plan = self.setup.rollout, self.plan(iteration)
        generator = torch.Generator().manual_seed(iteration + 1)
        rewards = torch.rand(settings.samples_per_step, dtype=torch.float64, generator=generator)
        valid = torch.ones(settings.samples_per_step, dtype=torch.bool)
        valid[list(failed)] = False
        return ScoredBatch(
            rewards=torch.where(valid, rewards, 0.0),
            groups=torch.arange(settings.prompts_per_step).repeat_interleave(settings.samples_per_prompt),
            valid=valid,
            local=plan.ids - iteration * settings.samples_per_step,
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of this rank's weights."""
        self.optimizer.finish_param_sync()
        return {name: parameter.detach().clone() for name, parameter in self.policy.parameters().items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """A copy of this rank's reduced gradients."""
        return {
            name: parameter.main_grad.clone()
            for name, parameter in self.policy.parameters().items()
            if parameter.requires_grad
        }


def build_engine(folder: Path, groups: ParallelGroups, setup: Setup) -> Engine:
    """An engine with the folder's weights."""
    family = build_family("qwen_image", folder)
    height, width = PIXELS
    model = ModelSettings(
        model=str(folder), height=height, width=width, bf16=setup.bf16, recompute_granularity=setup.recompute
    )
    policy = Policy(family, groups, model, setup.parallel, setup.lora)
    load_transformer(policy.base_parameters(), family.mapping, folder / "transformer", groups)
    initialize_adapters(policy.adapters(), policy.mapping, groups, setup.lora.lora_rank, setup.seed)
    algorithm = build_algorithm(setup.algorithm)
    reference = reference_of(policy) if algorithm.needs.reference else None
    optimizer = PolicyOptimizer(policy, setup.optimizer, setup.parallel, train_iters=10)
    components = ToyComponents() if groups.is_model_source else None
    encoder = PromptEncoder(components, groups, setup.rollout.negative_prompt)
    rules = UpdateRules(
        updates=setup.algorithm.updates_per_rollout,
        micro_batch_size=setup.optimizer.micro_batch_size,
        kl_variance=setup.algorithm.kl_variance,
        max_log_prob_gap=setup.max_log_prob_gap,
    )
    timers = PhaseTimers(get_platform().synchronize)
    return Engine(
        setup=setup,
        groups=groups,
        family=family,
        policy=policy,
        algorithm=algorithm,
        optimizer=optimizer,
        encoder=encoder,
        rollout=NativeRollout(policy, encoder, components, height, width),
        updater=Updater(policy, optimizer, algorithm, encoder, setup.guidance, rules, reference, timers),
        schedule=family.schedule(setup.rollout.num_inference_steps, height, width),
    )


def with_segment(samples: Samples, **changes: torch.Tensor) -> Samples:
    """The samples with other tensors in their segment."""
    segment: FlowSegment = replace(samples.segments["image"], **changes)
    return replace(samples, segments={"image": segment})
