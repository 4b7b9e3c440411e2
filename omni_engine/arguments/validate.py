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
from omni_engine.arguments.pipeline_folder import PipelineFacts, read_pipeline_facts
from omni_engine.arguments.rules import Rules, divisors, listed, multiples_near
from omni_engine.arguments.settings import FLAGS, Settings
from omni_engine.arguments.validate_execution import check_execution
from omni_engine.arguments.validate_layout import check_layout, layout_names


def validate(settings: Settings, world_size: int) -> list[Fault]:
    """Every fault of the settings for a run of `world_size` processes; an empty list when it can start.

    Of the model folder only names and JSON are read, of the prompt files and output folders only whether they can be
    read or written. The lines of a prompt file are checked by `omni_engine.data`, scorer names by `omni_engine.reward`.
    """
    values = settings.values()
    alone = Rules(settings)
    for name, flag in FLAGS.items():
        problem = flag.check(values[name])
        if problem is not None:
            alone.refuse([name], problem, flag.expected)
    spoilt = {fault.names[0] for fault in alone.faults}

    together = Rules(settings_without(values, spoilt))
    facts = read_pipeline_facts(together.settings.model.model)
    _check_model(together, facts)
    check_layout(together, facts, world_size)
    check_execution(together, world_size)
    _check_batch(together, world_size)
    _check_window(together)
    _check_advantages(together)
    _check_optimizer(together)
    _check_adapters_and_average(together)
    _check_rewards(together)
    _check_inputs(together)
    _check_outputs(together)
    return alone.faults + [fault for fault in together.faults if spoilt.isdisjoint(fault.names)]


def settings_without(values: Mapping[str, Any], spoilt: Collection[str]) -> Settings:
    """Settings in which refused values give way to their defaults (or ""), so that the rest can still be judged."""
    usable = {name: value for name, value in values.items() if name not in spoilt}
    return Settings.from_values(usable | {name: "" for name in spoilt if FLAGS[name].required})


def _check_model(rules: Rules, facts: PipelineFacts) -> None:
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
            rules.refuse([name], what, f"Use {multiples_near(pixels, multiple)}")


def _check_batch(rules: Rules, world_size: int) -> None:
    rollout, algorithm, parallel = rules.settings.rollout, rules.settings.algorithm, rules.settings.parallel
    replicas = parallel.data_parallel_size(world_size)
    if replicas == 0 or world_size % replicas:
        return  # the layout is refused already
    prompts, updates = rollout.prompts_per_step, algorithm.updates_per_rollout
    layout = layout_names(parallel)
    shares = updates * replicas
    if prompts % shares:
        fitting = [count for count in divisors(prompts) if prompts % (count * replicas) == 0]
        also = f", or one of {listed(fitting)} as --updates-per-rollout" if fitting else ""
        rules.refuse(
            ["prompts_per_step", "updates_per_rollout", *layout],
            f"the prompts cannot be shared evenly by {updates} updates x {replicas} data-parallel ranks = {shares}",
            f"Use {multiples_near(prompts, shares)} as --prompts-per-step{also}",
        )
        return
    samples = prompts * rollout.samples_per_prompt // shares
    micro_batch_size = rules.settings.optimizer.micro_batch_size
    if samples % micro_batch_size:
        rules.refuse(
            ["micro_batch_size", "prompts_per_step", "samples_per_prompt", "updates_per_rollout", *layout],
            f"the {samples} samples of a data-parallel rank for one update cannot be cut into equal micro-batches",
            f"Use one of {listed(divisors(samples))} as --micro-batch-size",
        )
        return
    passes = samples // micro_batch_size * rollout.sde_window_size
    stages = parallel.pipeline_model_parallel_size
    if parallel.num_virtual_stages_per_pipeline_rank > 1 and passes % stages:
        fitting = [size for size in divisors(samples) if samples // size * rollout.sde_window_size % stages == 0]
        remedy = f"Use one of {listed(fitting)} as --micro-batch-size, or" if fitting else "Use"
        rules.refuse(
            ["num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_size", "micro_batch_size"],
            f"interleaved stages take micro-batches in groups of {stages}, and an update has {passes} (samples / "
            f"micro-batch x steps of the window: {samples} / {micro_batch_size} x {rollout.sde_window_size})",
            f"{remedy} --num-virtual-stages-per-pipeline-rank 1",
        )


def _check_window(rules: Rules) -> None:
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


def _check_advantages(rules: Rules) -> None:
    algorithm = rules.settings.algorithm
    if algorithm.advantage_std != "none" and algorithm.advantage_epsilon == algorithm.advantage_std_floor == 0:
        rules.refuse(
            ["advantage_std", "advantage_epsilon", "advantage_std_floor"],
            "equal rewards have a standard deviation of 0, which the advantage would be divided by",
            "Use a small --advantage-epsilon such as 1e-4, or an --advantage-std-floor above 0",
        )


def _check_optimizer(rules: Rules) -> None:
    optimizer, train_iters = rules.settings.optimizer, rules.settings.training.train_iters
    if optimizer.min_lr > optimizer.lr:
        rules.refuse(["min_lr", "lr"], "the lowest rate is above the highest", f"Use at most {optimizer.lr:g}")
    last = optimizer.lr_decay_iters if optimizer.lr_decay_iters is not None else train_iters
    if optimizer.lr_warmup_iters >= last:
        end = "train_iters" if optimizer.lr_decay_iters is None else "lr_decay_iters"
        what = f"the warm-up does not end before iteration {last}, where the decay ends"
        rules.refuse(["lr_warmup_iters", end], what, f"Use a warm-up of at most {last - 1} iterations")


def _check_adapters_and_average(rules: Rules) -> None:
    """Flags that ask for weights which the run does not hold. Target modules are compared with the model's own names
    when it is built."""
    lora, ema, export = rules.settings.lora, rules.settings.ema, rules.settings.checkpoint.export_hf
    if lora.export_merged and not lora.enabled:
        what = "there are no adapters to merge: all weights are trained and exported"
        rules.refuse(["export_merged", "lora_rank"], what, "Use --no-export-merged, or a --lora-rank above 0")
    if lora.export_merged and export is None:
        rules.refuse(["export_merged", "export_hf"], "nothing is exported", "Give --export-hf a folder")
    for name in ("eval_weights", "export_weights"):
        if getattr(ema, name) == "ema" and not ema.ema_decay:
            remedy = f"Set --ema-decay (0.9 in flow_grpo), or --{name.replace('_', '-')} policy"
            rules.refuse([name, "ema_decay"], "no average of the weights is kept", remedy)


def _check_rewards(rules: Rules) -> None:
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


def _check_inputs(rules: Rules) -> None:
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


def _check_outputs(rules: Rules) -> None:
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
