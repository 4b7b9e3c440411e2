# SPDX-License-Identifier: Apache-2.0
"""Everything a run holds, and how it is put together from the settings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omni_engine.algorithms import build_algorithm
from omni_engine.arguments import RolloutSettings, Settings
from omni_engine.checkpoint import (
    check_export_target,
    check_same_run,
    export_policy,
    load_checkpoint,
    load_transformer,
    model_fingerprint,
    read_state,
    save_checkpoint,
)
from omni_engine.data import PromptSampler, load_prompts
from omni_engine.flow import Schedule
from omni_engine.models import Components, build_family
from omni_engine.models.adapters import initialize_adapters
from omni_engine.models.guidance import Guidance
from omni_engine.models.policy import Policy
from omni_engine.parallel import ParallelGroups
from omni_engine.platform import get_platform
from omni_engine.reward import RewardPool, prompt_check
from omni_engine.rollout import NativeRollout, PromptEncoder, RolloutEngine
from omni_engine.training.evaluation import Evaluator
from omni_engine.training.logging import PhaseTimers, RunDirectory, RunLogger, open_run_directory
from omni_engine.training.logging.summary import summarize
from omni_engine.training.optimizer import PolicyOptimizer
from omni_engine.training.profile import Profiler
from omni_engine.training.reference import reference_of
from omni_engine.training.scoring import RewardCollector
from omni_engine.training.throughput import FlopsMeter
from omni_engine.training.update import Updater, UpdateRules


@dataclass
class Run:
    """The parts of a run that the loop calls. `iteration` counts the finished ones."""

    settings: Settings
    groups: ParallelGroups
    policy: Policy
    optimizer: PolicyOptimizer
    engine: RolloutEngine
    updater: Updater
    rewards: RewardCollector
    evaluator: Evaluator | None
    prompts: list[str]
    sampler: PromptSampler
    schedule: Schedule
    logger: RunLogger
    directory: RunDirectory
    timers: PhaseTimers
    profiler: Profiler
    meter: FlopsMeter
    identity: dict[str, Any]
    iteration: int = 0
    pool: RewardPool | None = field(default=None, repr=False)

    @property
    def rollout(self) -> RolloutSettings:
        return self.settings.rollout

    @property
    def seed(self) -> int:
        return self.settings.training.seed

    @property
    def train_iters(self) -> int:
        return self.settings.training.train_iters

    @property
    def eval_interval(self) -> int:
        return self.settings.training.eval_interval

    @property
    def save_interval(self) -> int:
        return self.settings.checkpoint.save_interval

    def save(self) -> None:
        """Write a checkpoint of the finished iterations."""
        self.optimizer.finish_param_sync()
        save_checkpoint(self.settings.save_dir, self.iteration, self.policy, self.optimizer, self.identity)

    def weights(self, choice: str) -> AbstractContextManager[None]:
        """The block runs with the trained weights (`policy`) or with their moving average (`ema`)."""
        average = self.optimizer.average
        return nullcontext() if choice == "policy" or average is None else average.in_place()

    def memory(self) -> dict[str, float]:
        """Peak memory of this rank so far, in GB."""
        platform = get_platform()
        return {
            "memory/host_peak_gb": platform.host_peak_bytes() / 1e9,
            "memory/device_peak_gb": platform.device_peak_bytes() / 1e9,
        }

    def finish(self) -> None:
        """Export if asked to, write the summary, and say what was gained."""
        places: list[tuple[Path, str]] = []
        if self.settings.checkpoint.export_hf is not None:
            self.optimizer.finish_param_sync()
            target = Path(self.settings.checkpoint.export_hf)
            merge = self.settings.lora.export_merged
            if self.groups.dp_rank == 0:
                with self.weights(self.settings.ema.export_weights):
                    export_policy(self.policy, Path(self.settings.model.model), target, merge)
            whole = self.policy.lora is None or merge
            told = "the trained pipeline; DiffusionPipeline.from_pretrained loads it"
            places.append((target, told if whole else "the trained adapters; pipeline.load_lora_weights loads them"))
        layout = {
            "tp": self.groups.tp_size,
            "ulysses": self.groups.ulysses_size,
            "ring": self.groups.ring_size,
            "pp": self.groups.pp_size,
            "vpp": self.groups.vpp_size,
            "dp": self.groups.dp_size,
        }
        summary = summarize(
            self.logger.history,
            layout=layout,
            seed=self.seed,
            images_per_iteration=self.rollout.samples_per_step,
            times_after=self.timers.collect(),
        )
        self.logger.finish(summary, places)

    def close(self) -> None:
        """End the scorers and the log. Safe after an error."""
        if self.pool is not None:
            self.pool.close()
        self.profiler.close()
        self.logger.close()


def build_run(settings: Settings, groups: ParallelGroups) -> Run:
    """Put a run together, resumed from `--load` where that is given.

    Raises:
        ValueError, FileNotFoundError: a prompt file or the model folder is at fault.
        CheckpointError, RewardError, LoggingError: of those parts.
    """
    prompts, held_out = _read_prompts(settings)
    sampler = PromptSampler(len(prompts), settings.rollout.prompts_per_step, settings.training.seed)
    identity = _identity(settings, prompts)
    resumed = _check_folders(settings, identity)
    directory = open_run_directory(settings.run_dir, rank=groups.rank, resumed_iteration=resumed)
    family = build_family(settings.model.model_family, settings.model.model)
    height, width = settings.model.height, settings.model.width
    policy = Policy(family, groups, settings.model, settings.parallel, settings.lora)
    load_transformer(policy.base_parameters(), family.mapping, Path(settings.model.model) / "transformer", groups)
    initialize_adapters(policy.adapters(), policy.mapping, groups, settings.lora.lora_rank, settings.training.seed)
    algorithm = build_algorithm(settings.algorithm)
    reference = reference_of(policy) if algorithm.needs.reference else None
    optimizer = PolicyOptimizer(policy, settings.optimizer, settings.parallel, settings.training.train_iters)
    if settings.ema.ema_decay:
        optimizer.keep_average(settings.ema.ema_decay, settings.ema.ema_interval)
    if settings.checkpoint.load is not None:
        load_checkpoint(settings.checkpoint.load, policy, optimizer, resumed)
    components = family.load_components(settings.model.max_text_tokens) if groups.is_model_source else None
    encoder = PromptEncoder(components, groups, settings.rollout.negative_prompt)
    engine = NativeRollout(policy, encoder, components, height, width)
    guidance = Guidance(settings.rollout.true_cfg_scale, settings.rollout.cfg_gradient)
    pool = _open_pool(settings, groups, components)
    logger = RunLogger(directory, settings.logging, groups.rank, resumed)
    if groups.rank == 0:
        directory.write_args(settings.to_dict())
    profiler = Profiler(settings.logging, directory.path, policy, optimizer, logger.message)
    timers = PhaseTimers(get_platform().synchronize, logger.phase, profiler.phase_range())
    rules = UpdateRules(
        updates=settings.algorithm.updates_per_rollout,
        micro_batch_size=settings.optimizer.micro_batch_size,
        kl_variance=settings.algorithm.kl_variance,
        max_log_prob_gap=settings.rollout.max_log_prob_gap,
        recompute_old_log_prob=settings.rollout.old_log_prob == "recompute",
    )
    evaluator = None
    if held_out:
        schedule = family.schedule(settings.data.eval_num_inference_steps, height, width)
        evaluator = Evaluator(engine, pool, held_out, schedule, guidance, settings.data, rules.micro_batch_size, groups)
    return Run(
        settings=settings,
        groups=groups,
        policy=policy,
        optimizer=optimizer,
        engine=engine,
        updater=Updater(policy, optimizer, algorithm, encoder, guidance, rules, reference, timers),
        rewards=RewardCollector(pool, groups),
        evaluator=evaluator,
        prompts=prompts,
        sampler=sampler,
        schedule=family.schedule(settings.rollout.num_inference_steps, height, width),
        logger=logger,
        directory=directory,
        timers=timers,
        profiler=profiler,
        meter=FlopsMeter(policy, encoder, settings.rollout, algorithm.needs.reference, settings.logging.peak_tflops),
        identity=identity,
        iteration=resumed or 0,
        pool=pool,
    )


def _read_prompts(settings: Settings) -> tuple[list[str], list[str]]:
    """Training prompts, and held-out prompts (none where no evaluation is wanted)."""
    rewards = settings.reward
    prompts = load_prompts(settings.data.train_prompts, prompt_check(rewards.reward))
    if settings.data.eval_prompts is None or settings.training.eval_interval == 0:
        return prompts, []
    check = prompt_check([*rewards.reward, *rewards.eval_reward])
    return prompts, load_prompts(settings.data.eval_prompts, check)[: settings.data.eval_num_prompts]


def _check_folders(settings: Settings, identity: dict[str, Any]) -> int | None:
    """Refuse a checkpoint of another run, and an export that could not be written at the end, before any work is done.

    Returns: the iteration to resume from, None for a fresh run.
    """
    checkpoint = settings.checkpoint
    if checkpoint.export_hf is not None:
        adapters = settings.lora.enabled and not settings.lora.export_merged
        check_export_target(Path(settings.model.model), Path(checkpoint.export_hf), adapters)
    if checkpoint.load is None:
        return None
    saved = read_state(checkpoint.load)
    check_same_run(saved.state, identity)
    return saved.iteration


def _open_pool(settings: Settings, groups: ParallelGroups, components: Components | None) -> RewardPool | None:
    if components is None:
        return None
    reward = settings.reward
    watchers: Sequence[str] = [name for name in reward.eval_reward if name not in reward.reward]
    size = (settings.model.height, settings.model.width)
    return RewardPool(reward.reward, reward.reward_weights, reward, watchers=watchers, picture_size=size)


def _identity(settings: Settings, prompts: Sequence[str]) -> dict[str, Any]:
    """What must be equal for a checkpoint to be continued as the same run."""
    digest = hashlib.sha256("\n".join(prompts).encode()).hexdigest()
    rollout, algorithm = settings.rollout, settings.algorithm
    lora = settings.lora.identity() or dict.fromkeys(("rank", "alpha", "target_modules"))
    return {
        "seed": settings.training.seed,
        "train_prompts_sha256": digest,
        "model_sha256": model_fingerprint(settings.model.model),
        "model_family": settings.model.model_family,
        **{f"lora_{name}": value for name, value in lora.items()},
        "height": settings.model.height,
        "width": settings.model.width,
        "prompts_per_step": rollout.prompts_per_step,
        "samples_per_prompt": rollout.samples_per_prompt,
        "num_inference_steps": rollout.num_inference_steps,
        "sde_type": rollout.sde_type,
        "noise_level": rollout.noise_level,
        "sde_window_size": rollout.sde_window_size,
        "sde_window_range": list(rollout.sde_window_range),
        "true_cfg_scale": rollout.true_cfg_scale,
        "negative_prompt": rollout.negative_prompt,
        "algorithm": algorithm.algorithm,
        "updates_per_rollout": algorithm.updates_per_rollout,
        "reward": list(settings.reward.reward),
        "reward_weights": list(settings.reward.reward_weights),
    }
