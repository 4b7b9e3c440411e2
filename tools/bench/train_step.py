# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of our Qwen-Image block stack and of diffusers', interleaved in one process.

    python -m tools.bench.train_step [--json] [--repeats 15] [--threads 1] [--wall] [--recompute selective]

Speed is the median over pairs of neighbouring steps, the ceiling is the rate of a large matrix product measured between
them. Times are processor time of this process, which other programs do not add to; `--wall` takes the clock's instead,
as an accelerator or several threads need. Memory is the peak of the allocations of one step above the weights, as
torch's profiler counts them.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from torch.profiler import ProfilerActivity, profile

import omni_engine  # noqa: F401 - prepares megatron.core's import
from omni_engine.arguments import ModelSettings, ParallelSettings
from omni_engine.checkpoint.huggingface import load_transformer
from omni_engine.models import DenoiserInput, TextCondition, build_family
from omni_engine.models.policy import Policy
from omni_engine.parallel import ParallelGroups, destroy, initialize
from omni_engine.platform import get_platform


@dataclass(frozen=True)
class Case:
    """Sizes of a comparison."""

    name: str
    layers: int
    heads: int
    head_dim: int
    text_dim: int
    grid: tuple[int, int, int]
    text_tokens: int
    batch: int


CASES = (
    Case("tiny", 4, 4, 32, 64, (1, 2, 4), 12, 32),
    Case("1-layer full width", 1, 24, 128, 3584, (1, 32, 32), 64, 1),
)
AXES = {32: (8, 12, 12), 128: (16, 56, 56)}


def build(case: Case, folder: Path, recompute: str) -> tuple[Callable[[], None], Callable[[], None], int]:
    """A step of ours, a step of diffusers', and the matrix-product FLOPs of a forward and backward pass."""
    torch.manual_seed(0)
    reference = QwenImageTransformer2DModel(
        in_channels=64,
        num_layers=case.layers,
        attention_head_dim=case.head_dim,
        num_attention_heads=case.heads,
        joint_attention_dim=case.text_dim,
        axes_dims_rope=AXES[case.head_dim],
    )
    reference.save_pretrained(folder / "transformer", max_shard_size="100GB")
    FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).save_pretrained(folder / "scheduler")
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text(json.dumps({"temperal_downsample": [False, True, True]}))
    family = build_family("qwen_image", folder)
    groups = initialize_once()
    height, width = 16 * case.grid[1], 16 * case.grid[2]
    settings = ModelSettings(model=str(folder), height=height, width=width, recompute_granularity=recompute)
    policy = Policy(family, groups, settings, ParallelSettings())
    load_transformer(policy.parameters(), family.mapping, folder / "transformer", groups)

    tokens = case.grid[1] * case.grid[2]
    latents, cotangent = torch.randn(2, case.batch, tokens, 64)
    embeddings = torch.randn(case.batch, case.text_tokens, case.text_dim)
    sigma = torch.full((case.batch,), 0.7)
    text = TextCondition(embeddings, (case.text_tokens,) * case.batch)
    inputs = DenoiserInput({"image": latents}, sigma, text, case.grid)

    def ours() -> None:
        (policy.stage(inputs) * cotangent).sum().backward()

    def theirs() -> None:
        out = reference(latents, embeddings, None, sigma, [[case.grid]] * case.batch, return_dict=False)[0]
        (out * cotangent).sum().backward()

    work = sum(block.multiply_adds for block in family.costs(tokens, case.text_tokens).blocks) * case.batch
    return ours, theirs, 3 * 2 * work


@cache
def initialize_once() -> ParallelGroups:
    """Groups of one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group(get_platform().dist_backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    return initialize(ParallelSettings(), seed=0)


def seconds(step: Callable[[], object], clock: Callable[[], float]) -> float:
    """Time of a step by the given clock."""
    start = clock()
    step()
    get_platform().synchronize()
    return clock() - start


def peak_bytes(step: Callable[[], None]) -> int:
    """Largest sum of live allocations during a step, relative to its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    live = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def matmul_rate(clock: Callable[[], float]) -> float:
    """FLOP/s of a square matrix product."""
    size = 1024
    a, b = torch.randn(2, size, size)
    return 2 * size**3 / min(seconds(lambda: torch.mm(a, b), clock) for _ in range(3))


def measure(case: Case, recompute: str, repeats: int, clock: Callable[[], float]) -> dict[str, float | str]:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs, flops = build(case, Path(folder), recompute)
    for step in (ours, theirs, ours, theirs):
        step()
    pairs, rates = [], []
    for _ in range(repeats):
        pairs.append((seconds(ours, clock), seconds(theirs, clock)))
        rates.append(matmul_rate(clock))
    rate = statistics.median(rates)
    return {
        "model": case.name,
        "recompute": recompute,
        "speed_over_diffusers": statistics.median(other / own for own, other in pairs),
        "memory_over_diffusers": peak_bytes(ours) / peak_bytes(theirs),
        "fraction_of_matmul": flops / statistics.median(own for own, _ in pairs) / rate,
        "diffusers_fraction_of_matmul": flops / statistics.median(other for _, other in pairs) / rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each model")
    parser.add_argument("--threads", type=int, default=1, help="host threads")
    parser.add_argument(
        "--recompute",
        choices=("none", "selective", "full"),
        action="append",
        help="of ours (not given: none, selective)",
    )
    parser.add_argument("--wall", action="store_true", help="measure by the clock on the wall")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.perf_counter if arguments.wall else time.process_time
    for case, recompute in product(CASES, arguments.recompute or ("none", "selective")):
        row = measure(case, recompute, arguments.repeats, clock)
        if arguments.json:
            print(json.dumps(row), flush=True)
        else:
            print(
                "  ".join(
                    f"{key} {value:.3f}" if isinstance(value, float) else f"{value:20s}" for key, value in row.items()
                )
            )
    destroy()


if __name__ == "__main__":
    main()
