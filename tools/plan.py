# SPDX-License-Identifier: Apache-2.0
"""Which layout to train under: memory of the fullest rank by part and time of each phase, for every layout there is.

    python -m tools.plan --model qwen-image --devices 4 --device-memory-gb 141
    python -m tools.plan --model /data/Qwen-Image --devices 8 --device-memory-gb 80 --lora-rank 64 --json

Needs neither a device nor weights: a pipeline folder's config files and the headers of its safetensors files, or the
name of a published model. Memory follows omni_engine/models/costs.py, which is measured against runs
(tools/bench/plan_memory.py); time is arithmetic from --peak-tflops, --efficiency and the bandwidths, which are
assumptions. docs/performance.md explains both. The exit status is 1 where no layout fits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import omni_engine  # noqa: F401 - prepares megatron.core's import
from omni_engine.arguments import LoraSettings, RolloutSettings
from omni_engine.models.costs import Memory, Rollout
from tools.planner.candidates import RECOMPUTE, candidates
from tools.planner.estimate import Estimate
from tools.planner.job import PUBLISHED, Job, Machine, open_model

GB = 1e9
FIXED = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ulysses": "ulysses_degree",
    "ring": "ring_degree",
    "recompute": "recompute",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns: the exit status."""
    options = parse(arguments)
    try:
        job, machine = job_of(options), machine_of(options)
        found = plan(job, machine, options)
    except (ValueError, FileNotFoundError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    if options.json:
        for place, one in enumerate(found):
            print(json.dumps(row(one, recommended=place == 0 and one.fits)))
    else:
        print("\n".join(report(job, machine, found, options.top)))
    return 0 if found[0].fits else 1


def plan(job: Job, machine: Machine, options: argparse.Namespace) -> list[Estimate]:
    """Every layout: first those that fit, by time; then the others, the closest first.

    Raises:
        ValueError: the engine takes no layout of this job.
    """
    fixed = {field: getattr(options, name) for name, field in FIXED.items() if getattr(options, name) is not None}
    found = [Estimate(job, machine, one) for one in candidates(job, machine, fixed)]
    if not found:
        asked = " ".join(f"--{name} {getattr(options, name)}" for name, field in FIXED.items() if field in fixed)
        raise ValueError(
            f"no layout of {machine.devices} devices {f'with {asked} ' if asked else ''}takes this job: {job.prompts} "
            f"prompts must divide by {job.updates} updates x replicas, the samples of a replica's update by "
            f"--micro-batch-size {job.micro_batch_size}, and {job.model.heads} heads by TP x Ulysses; change "
            "--samples, --updates-per-rollout, --micro-batch-size or --devices"
        )
    return sorted(found, key=lambda one: (not one.fits, one.seconds.total if one.fits else 0.0, one.memory.total))


# ---- what is asked for


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help=f"a pipeline folder, or one of: {', '.join(PUBLISHED)}")
    add("--model-family", default="qwen_image", help="family of a folder")
    add("--devices", type=int, required=True, help="devices of the job")
    add("--device-memory-gb", type=float, required=True, help="memory of a device in 1e9 bytes")
    add("--json", action="store_true", help="print one JSON object a layout")
    add("--top", type=int, default=15, help="layouts to show")

    group = parser.add_argument_group("what is trained")
    add = group.add_argument
    add("--height", type=int, default=512, help="of the images, in pixels")
    add("--width", type=int, default=512, help="of the images, in pixels")
    add("--text-tokens", type=int, default=128, help="of the longest prompt, to which the others are padded")
    add("--bf16", action=argparse.BooleanOptionalAction, default=True, help="bfloat16 instead of float32")
    add("--samples", type=int, default=512, help="of an iteration")
    add("--samples-per-prompt", type=int, default=16, help="group of a prompt")
    add("--micro-batch-size", type=int, default=4, help="samples of a forward pass")
    add("--updates-per-rollout", type=int, default=2, help="optimizer steps of an iteration")
    add("--num-inference-steps", type=int, default=10, help="denoising steps of a sample")
    add("--sde-window-size", type=int, default=2, help="steps that are trained on")
    add("--true-cfg-scale", type=float, default=1.0, help="guidance; above 1 a second branch runs")
    add("--cfg-gradient", choices=("both", "conditional"), default="both", help="branches that get a gradient")
    add("--old-log-prob", choices=("rollout", "recompute"), default="rollout", help="as the engine's flag")
    add("--kl-coef", type=float, default=0.0, help="above 0 the reference weights are held")
    add("--ema-decay", type=float, default=0.0, help="above 0 an average of the trained weights is held")
    add("--lora-rank", type=int, default=0, help="above 0 adapters are trained beside frozen weights")
    add("--lora-target-modules", nargs="+", default=None, help="as the engine's flag")
    add("--rollout-copy-bytes", type=int, default=0, help="bytes a weight of another rollout engine's copy; native: 0")
    add("--rollout-tp", type=int, default=1, help="ranks that share that copy")

    group = parser.add_argument_group("the machine")
    add = group.add_argument
    add("--devices-per-node", type=int, default=8, help="devices with fast links between them")
    add("--reserved-gb", type=float, default=6.0, help="of a device that tensors cannot have: context, libraries, gaps")
    add("--peak-tflops", type=float, default=989.0, help="dense matrix products of a device (989: H100, H200 in bf16)")
    add("--efficiency", type=float, default=0.4, help="part of the peak that passes are assumed to reach")
    add("--bandwidth-gbps", type=float, default=300.0, help="GB/s that a device sends within a node")
    add("--inter-node-gbps", type=float, default=40.0, help="GB/s that a device sends between nodes")
    add(
        "--optimizer-step",
        choices=("fused", "each", "all"),
        default="fused",
        help="memory of a step of Adam: transformer-engine's or apex's needs none; torch's steps each weight by itself "
        "on a CPU, and all at once on a GPU",
    )

    group = parser.add_argument_group("only layouts with")
    for name, what in (("tp", "tensor-parallel"), ("pp", "pipeline"), ("ulysses", "Ulysses"), ("ring", "ring")):
        group.add_argument(f"--{name}", type=int, default=None, help=f"{what} ranks")
    group.add_argument("--recompute", choices=RECOMPUTE, default=None, help="recompute granularity")
    return parser.parse_args(arguments)


def job_of(options: argparse.Namespace) -> Job:
    """The job of the command line.

    Raises:
        ValueError, FileNotFoundError: of the model, the size of the images or the samples.
    """
    group = options.samples_per_prompt
    if options.samples % group:
        raise ValueError(
            f"--samples {options.samples} are no whole groups of --samples-per-prompt {group}: use "
            f"{options.samples // group * group or group}"
        )
    model = open_model(options.model, options.model_family)
    model.family.latent_shape(options.height, options.width)
    targets = {} if options.lora_target_modules is None else {"lora_target_modules": tuple(options.lora_target_modules)}
    return Job(
        model=model,
        height=options.height,
        width=options.width,
        text_tokens=options.text_tokens,
        rollout=RolloutSettings(
            prompts_per_step=options.samples // options.samples_per_prompt,
            samples_per_prompt=options.samples_per_prompt,
            num_inference_steps=options.num_inference_steps,
            sde_window_size=options.sde_window_size,
            true_cfg_scale=options.true_cfg_scale,
            cfg_gradient=options.cfg_gradient,
            old_log_prob=options.old_log_prob,
        ),
        micro_batch_size=options.micro_batch_size,
        updates=options.updates_per_rollout,
        bf16=options.bf16,
        lora=LoraSettings(lora_rank=options.lora_rank, **targets),
        reference=options.kl_coef > 0,
        average=options.ema_decay > 0,
        engine=Rollout(options.rollout_copy_bytes, options.rollout_tp),
        optimizer_step=options.optimizer_step,
    )


def machine_of(options: argparse.Namespace) -> Machine:
    return Machine(
        devices=options.devices,
        memory_bytes=options.device_memory_gb * GB,
        reserved_bytes=options.reserved_gb * GB,
        peak_flops=options.peak_tflops * 1e12,
        efficiency=options.efficiency,
        bandwidth=options.bandwidth_gbps * GB,
        slow_bandwidth=options.inter_node_gbps * GB,
        per_node=options.devices_per_node,
    )


# ---- what is told


def row(one: Estimate, recommended: bool) -> dict[str, Any]:
    """A layout for programs."""
    memory, seconds = one.memory, one.seconds
    return {
        "layout": one.layout.describe(),
        "recompute": one.candidate.recompute,
        "flags": one.flags,
        "fits": one.fits,
        "recommended": recommended,
        "fullest_pipeline_rank": one.fullest,
        "memory_bytes": {name: round(size) for name, size in parts(memory)} | {"total": round(memory.total)},
        "usable_bytes": round(one.machine.usable_bytes),
        "seconds": {field.name: getattr(seconds, field.name) for field in fields(seconds)} | {"total": seconds.total},
        "images_per_second_per_device": one.images_per_second,
        "mfu": one.mfu,
    }


def parts(memory: Memory) -> Iterator[tuple[str, float]]:
    """Bytes by part."""
    return ((field.name, getattr(memory, field.name)) for field in fields(memory))


COLUMNS = (
    ("weights", ("weights",)),
    ("grads", ("gradients",)),
    ("optim", ("optimizer",)),
    ("activ", ("activations",)),
    ("step", ("optimizer_step",)),
    ("rollout", ("rollout_copy",)),
    ("ref", ("reference", "average")),
    ("frozen", ("components",)),
    ("samples", ("samples",)),
)


def report(job: Job, machine: Machine, found: Sequence[Estimate], top: int) -> Iterator[str]:
    """The table and the advice, for people."""
    spec = found[0].spec
    yield (
        f"{job.model.name}: {spec.parameters / 1e9:.2f} B weights, {spec.trained_parameters / 1e9:.2f} B trained, "
        f"{'bfloat16' if job.bf16 else 'float32'}; {job.height} x {job.width} pixels ({job.image_tokens} tokens), "
        f"{job.text_tokens} text tokens; {job.samples} samples an iteration, micro-batch {job.micro_batch_size}"
    )
    yield (
        f"{machine.devices} devices of {machine.memory_bytes / GB:.0f} GB, {machine.usable_bytes / GB:.0f} GB of it "
        f"for tensors; {machine.peak_flops / 1e12:.0f} TFLOP/s at {machine.efficiency:.0%}"
    )
    fitting = sum(one.fits for one in found)
    yield f"{fitting} of {len(found)} layouts fit. GB of the fullest rank, seconds of an iteration:"
    yield ""
    width = max(len(one.layout.describe()) for one in found[:top])
    heads = "".join(f"{name:>8s}" for name, _ in COLUMNS)
    yield f"  {'layout':{width}s} recompute{heads}   total fits |  rollout   update    comm.    total img/s/dev"
    for one in found[:top]:
        yield line(one, width)
    yield ""
    yield from advice(machine, found)


def line(one: Estimate, width: int) -> str:
    memory, seconds = dict(parts(one.memory)), one.seconds
    cells = "".join(f"{sum(memory[part] for part in names) / GB:8.1f}" for _, names in COLUMNS)
    communication = seconds.rollout_communication + seconds.update_communication
    times = "".join(f"{value:9.1f}" for value in (seconds.rollout, seconds.update, communication, seconds.total))
    total, fits = one.memory.total / GB, "yes" if one.fits else "no"
    layout = f"{one.layout.describe():{width}s} {one.candidate.recompute:9s}"
    return f"  {layout}{cells}{total:8.1f} {fits:4s} |{times}{one.images_per_second:10.3f}"


def advice(machine: Machine, found: Sequence[Estimate]) -> Iterator[str]:
    """What to run and why, or what is missing."""
    best = found[0]
    free = (machine.usable_bytes - best.memory.total) / GB
    if best.fits:
        yield f"Recommended: {best.layout.describe()}, recompute {best.candidate.recompute}"
        yield f"  {best.flags}"
        yield f"  The fastest of those that fit; {free:.1f} GB of the fullest rank stay free, MFU {best.mfu:.2f}."
        leaner = min((one for one in found if one.fits), key=lambda one: one.memory.total)
        if leaner.memory.total < 0.8 * best.memory.total:
            slower = leaner.seconds.total / best.seconds.total
            yield (
                f"  With the least memory: {leaner.layout.describe()}, recompute {leaner.candidate.recompute}: "
                f"{leaner.memory.total / GB:.1f} GB, {slower:.2f} times the time."
            )
        return
    largest, size = max(parts(best.memory), key=lambda pair: pair[1])
    yield (
        f"Nothing fits. The closest is {best.layout.describe()}, recompute {best.candidate.recompute}: its fullest "
        f"rank lacks {-free:.1f} GB. The largest part of it: {largest.replace('_', ' ')}, {size / GB:.1f} GB."
    )
    yield f"  {REMEDIES[largest]}"


REMEDIES = {
    **dict.fromkeys(
        ("weights", "gradients"), "Use more devices, or train adapters (--lora-rank 64), which need no gradients of it."
    ),
    "optimizer": "Use more devices, train adapters (--lora-rank 64), or keep optimizer state on the host "
    "(--optimizer-cpu-offload).",
    "optimizer_step": "Install transformer-engine or apex, whose Adam steps in place (--optimizer-step fused).",
    "activations": "Lower --micro-batch-size, or the size of the images.",
    "rollout_copy": "Use the native rollout, which samples with the trainer's weights, or raise --rollout-tp.",
    **dict.fromkeys(("reference", "average"), "Use --kl-coef 0 and no --ema-decay, or more devices."),
    "components": "Use devices with more memory: the text encoder is held whole by one rank of a replica.",
    "samples": "Lower --samples or --sde-window-size.",
}

if __name__ == "__main__":
    sys.exit(main())
