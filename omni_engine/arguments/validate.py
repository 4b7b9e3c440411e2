# SPDX-License-Identifier: Apache-2.0
"""Every rule that settings must keep together, checked before any process group or model exists."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from omni_engine.arguments.checkpoint_folder import TRACKER_FILE
from omni_engine.arguments.faults import Fault
from omni_engine.arguments.flag import plain_text
from omni_engine.arguments.pipeline_folder import PipelineFacts, read_pipeline_facts
from omni_engine.arguments.settings import FLAGS, Settings


def validate(settings: Settings, world_size: int) -> list[Fault]:
    """Every fault of the settings for a run of `world_size` processes; an empty list when it can start.

    Of the model folder only names and JSON are read, of the prompt files and output folders only whether they can be
    read or written. The lines of a prompt file are checked by `omni_engine.data`, scorer names by `omni_engine.reward`.
    """
    values = settings.values()
    alone = _Rules(settings)
    for name, flag in FLAGS.items():
        problem = flag.check(values[name])
        if problem is not None:
            alone.refuse([name], problem, flag.expected)
    spoilt = {fault.names[0] for fault in alone.faults}

    together = _Rules(settings_without(values, spoilt))
    facts = read_pipeline_facts(together.settings.model.model)
    _check_model(together, facts)
    _check_layout(together, facts, world_size)
    _check_batch(together, world_size)
    _check_window(together)
    _check_advantages(together)
    _check_optimizer(together)
    _check_rewards(together)
    _check_inputs(together)
    _check_outputs(together)
    return alone.faults + [fault for fault in together.faults if spoilt.isdisjoint(fault.names)]


def settings_without(values: Mapping[str, Any], spoilt: Collection[str]) -> Settings:
    """Settings in which refused values give way to their defaults (or ""), so that the rest can still be judged."""
    usable = {name: value for name, value in values.items() if name not in spoilt}
    return Settings.from_values(usable | {name: "" for name in spoilt if FLAGS[name].required})


class _Rules:
    """Collects faults, each with the flags concerned and their values."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.faults: list[Fault] = []

    def refuse(self, names: Collection[str], what: str, remedy: str) -> None:
        values = self.settings.values()
        where = " ".join(f"{FLAGS[name].option} {plain_text(values[name])}" for name in names)
        self.faults.append(Fault(where, what, remedy, tuple(names)))


def _check_model(rules: _Rules, facts: PipelineFacts) -> None:
    model = rules.settings.model
    folder = Path(model.model)
    if not folder.is_dir():
        rules.refuse(["model"], "no such folder", "Give the folder of a downloaded diffusers pipeline")
    elif not (folder / "model_index.json").is_file():
        rules.refuse(["model"], "holds no model_index.json", "Give the pipeline's folder, not one of its parts")
    multiple = facts.pixel_multiple
    for name in ("height", "width"):
        pixels = getattr(model, name)
        if multiple is not None and pixels % multiple:
            what = (
                f"not a multiple of {multiple} pixels, the VAE's scale factor times the 2 x 2 packing of {model.model}"
            )
            rules.refuse([name], what, f"Use {_multiples_near(pixels, multiple)}")


def _check_layout(rules: _Rules, facts: PipelineFacts, world_size: int) -> None:
    parallel, model = rules.settings.parallel, rules.settings.model
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if world_size % (tensor * stages):
        rules.refuse(
            ["tensor_model_parallel_size", "pipeline_model_parallel_size"],
            f"{world_size} processes cannot be cut into model replicas of {tensor} x {stages} = {tensor * stages}",
            f"Start {_multiples_near(world_size, tensor * stages)} processes, or choose sizes whose product divides "
            f"{world_size}",
        )
    heads = facts.attention_heads
    if heads is not None and heads % tensor:
        what = f"the model's {heads} attention heads cannot be shared by {tensor} ranks"
        rules.refuse(["tensor_model_parallel_size"], what, f"Use one of {_listed(_divisors(heads))}")
    if facts.layers is not None and stages > facts.layers:
        what = f"the model has {facts.layers} blocks, fewer than stages"
        rules.refuse(["pipeline_model_parallel_size"], what, f"Use at most {facts.layers}")
    if not parallel.sequence_parallel:
        return
    names = ["sequence_parallel", "tensor_model_parallel_size"]
    if tensor == 1:
        what = "tokens are shared by the TP ranks, of which there is one"
        rules.refuse(names, what, "Use --no-sequence-parallel or --tensor-model-parallel-size 2 or more")
    tokens = facts.image_tokens(model.height, model.width)
    if tokens is not None and tokens % tensor:
        rules.refuse(
            [*names, "height", "width"],
            f"the {tokens} image tokens cannot be shared evenly by {tensor} ranks",
            f"Choose a size in pixels whose token count is a multiple of {tensor}, or one of "
            f"{_listed(_divisors(tokens))} as --tensor-model-parallel-size",
        )


def _check_batch(rules: _Rules, world_size: int) -> None:
    rollout, algorithm, parallel = rules.settings.rollout, rules.settings.algorithm, rules.settings.parallel
    replicas = parallel.data_parallel_size(world_size)
    if replicas == 0 or world_size % replicas:
        return  # the layout is refused already
    prompts, updates = rollout.prompts_per_step, algorithm.updates_per_rollout
    layout = ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
    shares = updates * replicas
    if prompts % shares:
        fitting = [count for count in _divisors(prompts) if prompts % (count * replicas) == 0]
        also = f", or one of {_listed(fitting)} as --updates-per-rollout" if fitting else ""
        rules.refuse(
            ["prompts_per_step", "updates_per_rollout", *layout],
            f"the prompts cannot be shared evenly by {updates} updates x {replicas} data-parallel ranks = {shares}",
            f"Use {_multiples_near(prompts, shares)} as --prompts-per-step{also}",
        )
        return
    samples = prompts * rollout.samples_per_prompt // shares
    micro_batch_size = rules.settings.optimizer.micro_batch_size
    if samples % micro_batch_size:
        rules.refuse(
            ["micro_batch_size", "prompts_per_step", "samples_per_prompt", "updates_per_rollout", *layout],
            f"the {samples} samples of a data-parallel rank for one update cannot be cut into equal micro-batches",
            f"Use one of {_listed(_divisors(samples))} as --micro-batch-size",
        )


def _check_window(rules: _Rules) -> None:
    rollout = rules.settings.rollout
    low, high = rollout.sde_window_range
    steps, size = rollout.num_inference_steps, rollout.sde_window_size
    names = ["sde_window_range", "sde_window_size", "num_inference_steps", "sde_type"]
    if low >= high:
        rules.refuse(names[:1], "the range is empty", f"Use a higher end, such as {low} {low + size}")
    elif size > high - low:
        rules.refuse(
            names[:2],
            f"a window of {size} steps does not fit into the {high - low} steps of its range",
            f"Use --sde-window-size {high - low} or less, or a longer range",
        )
    if high > steps:
        rules.refuse(
            [names[0], names[2]],
            f"the range ends at step {high}, but the steps are 0 to {steps - 1}",
            f"Use an end of at most {steps}",
        )
    if rollout.sde_type == "cps" and high >= steps:
        rules.refuse(
            names,
            f"the last step ({steps - 1}) of cps adds no noise, so it has no log-prob and cannot be trained on",
            f"Use an end of at most {steps - 1}" if steps > 1 else "Use more than one inference step",
        )
    if rollout.sde_type == "cps" and rollout.noise_level > 1:
        rules.refuse(["noise_level", "sde_type"], "cps mixes in sin(noise_level * pi / 2) of noise", "Use at most 1")


def _check_advantages(rules: _Rules) -> None:
    algorithm = rules.settings.algorithm
    if algorithm.advantage_std != "none" and algorithm.advantage_epsilon == algorithm.advantage_std_floor == 0:
        rules.refuse(
            ["advantage_std", "advantage_epsilon", "advantage_std_floor"],
            "equal rewards have a standard deviation of 0, which the advantage would be divided by",
            "Use a small --advantage-epsilon such as 1e-4, or an --advantage-std-floor above 0",
        )


def _check_optimizer(rules: _Rules) -> None:
    optimizer, train_iters = rules.settings.optimizer, rules.settings.training.train_iters
    if optimizer.min_lr > optimizer.lr:
        rules.refuse(["min_lr", "lr"], "the lowest rate is above the highest", f"Use at most {optimizer.lr:g}")
    last = optimizer.lr_decay_iters if optimizer.lr_decay_iters is not None else train_iters
    if optimizer.lr_warmup_iters >= last:
        end = "train_iters" if optimizer.lr_decay_iters is None else "lr_decay_iters"
        what = f"the warm-up does not end before iteration {last}, where the decay ends"
        rules.refuse(["lr_warmup_iters", end], what, f"Use a warm-up of at most {last - 1} iterations")


def _check_rewards(rules: _Rules) -> None:
    reward = rules.settings.reward
    if len(reward.reward) != len(reward.reward_weights):
        rules.refuse(
            ["reward", "reward_weights"],
            f"{len(reward.reward)} scorers, but {len(reward.reward_weights)} weights",
            f"Give one weight a scorer, such as --reward-weights {' '.join(['1'] * len(reward.reward))}",
        )
    if not any(reward.reward_weights):
        rules.refuse(
            ["reward_weights"], "no scorer counts, so there is nothing to learn from", "Use a weight other than 0"
        )
    repeated = [name for name, count in Counter(reward.reward + reward.eval_reward).items() if count > 1]
    if repeated:
        what = f"named more than once: {', '.join(repeated)}"
        rules.refuse(["reward", "eval_reward"], what, "Name each scorer once (scorers of --reward are evaluated too)")


def _check_inputs(rules: _Rules) -> None:
    data, load = rules.settings.data, rules.settings.checkpoint.load
    for name, path in (("train_prompts", data.train_prompts), ("eval_prompts", data.eval_prompts)):
        if path is None:
            continue
        remedy = "Give a UTF-8 text file with one prompt a line"
        if not Path(path).is_file():
            rules.refuse([name], "no such file", remedy)
        elif not os.access(path, os.R_OK):
            rules.refuse([name], "the file cannot be read", "Change its permissions")
        elif Path(path).stat().st_size == 0:
            rules.refuse([name], "the file is empty", remedy)
    if load is None:
        return
    remedy = "Give the --save folder of a run that has saved, or leave --load out to start from --model"
    if not Path(load).is_dir():
        rules.refuse(["load"], "no such folder", remedy)
    elif not (Path(load) / TRACKER_FILE).is_file():
        rules.refuse(["load"], f"holds no {TRACKER_FILE}", remedy)


def _check_outputs(rules: _Rules) -> None:
    settings = rules.settings
    logging = settings.logging
    if logging.run_name in ("", ".", "..") or "/" in logging.run_name or os.sep in logging.run_name:
        rules.refuse(["run_name"], "is not the name of a folder", "Use a name without slashes; --runs-dir says where")
    folders: list[tuple[str, Path | str | None]] = [
        ("runs_dir", settings.run_dir),
        ("save", settings.checkpoint.save),
        ("export_hf", settings.checkpoint.export_hf),
    ]
    for name, folder in folders:
        problem = None if folder is None else _not_writable(Path(folder))
        if problem is not None:
            rules.refuse([name], problem, "Choose a folder that can be created and written")
    for name, wanted in (("tensorboard", logging.tensorboard), ("wandb_project", logging.wandb_project is not None)):
        package = name.partition("_")[0]
        if wanted and importlib.util.find_spec(package) is None:
            off = "use --no-tensorboard" if name == "tensorboard" else "leave --wandb-project out"
            rules.refuse(
                [name], f"the package {package} is not installed", f"Install it (pip install {package}), or {off}"
            )


def _not_writable(folder: Path) -> str | None:
    """Why `folder` cannot be created or written into, or None. Creates nothing."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is a file, not a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written by this user"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _multiples_near(number: int, unit: int) -> str:
    """The multiples of `unit` around `number`, for people: `16 or 24`."""
    lower = number // unit * unit
    return f"{lower} or {lower + unit}" if lower else str(unit)


def _listed(numbers: list[int]) -> str:
    """A list for people, cut in the middle when long: `1, 2, 3, ..., 96`."""
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:11], "...", shown[-1]])
