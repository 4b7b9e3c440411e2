# SPDX-License-Identifier: Apache-2.0
"""Images per second of the engine's RL iteration against a plain torch loop, interleaved in one process.

    python -m tools.bench.rl_loop [--json] [--iterations 8] [--threads 2]

The plain loop is what one writes in an afternoon: diffusers' transformer, one scorer session called in line, torch's
AdamW, no overlap. Model, sizes, schedule, window, rewards and decoder are the same in both. Iterations alternate, the
medians are compared, and both print where their time goes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from diffusers import QwenImageTransformer2DModel

import omni_engine  # noqa: F401 - prepares megatron.core's import
from omni_engine.arguments import load_settings
from omni_engine.platform import get_platform
from omni_engine.reward.base import Score
from omni_engine.reward.ocr import Ocr
from omni_engine.training.loop import train_iteration
from omni_engine.training.run import Run, build_run
from tools.bench.train_step import initialize_once

CHUNK = 64
"""Samples of a forward pass of the plain loop."""


class PlainLoop:
    """FlowGRPO on a diffusers transformer in plain torch: rollout, reward and updates one after the other."""

    def __init__(self, run: Run):
        settings = run.settings
        self.run, self.rollout, self.algorithm = run, settings.rollout, settings.algorithm
        folder = f"{settings.model.model}/transformer"
        self.model = QwenImageTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.optimizer.lr, weight_decay=settings.optimizer.weight_decay
        )
        self.clip_grad = settings.optimizer.clip_grad
        self.scorer = Ocr()
        self.sigmas = run.schedule.sigmas
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def velocity(self, x: torch.Tensor, step: int, text: torch.Tensor) -> torch.Tensor:
        grid = self.run.policy.shape.grid
        time_of = self.sigmas[step].expand(len(x))
        return self.model(x, text, None, time_of, [[grid]] * len(x), return_dict=False)[0]

    def gaussian(self, x: torch.Tensor, velocity: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        sigma, following = self.sigmas[step], self.sigmas[step + 1]
        dt = following - sigma
        top = self.sigmas[1] if step == 0 else sigma
        std = torch.sqrt(sigma / (1 - top)) * self.rollout.noise_level
        mean = x * (1 + std**2 / (2 * sigma) * dt) + velocity * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
        return mean, std * torch.sqrt(-dt)

    def log_prob(self, x_next: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
        value = -((x_next - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
        return value.flatten(1).mean(1)

    def iteration(self, number: int) -> None:
        """One iteration on the prompts the engine would take."""
        run, group = self.run, self.rollout.samples_per_prompt
        prompts = [run.prompts[index] for index in run.sampler.at(number) for _ in range(group)]
        with self.phase("rollout"):
            trajectory, images, text = self.sample(prompts)
        with self.phase("reward"):
            scores = self.scorer.score(list(images), prompts)
            rewards = torch.tensor([score.value if isinstance(score, Score) else 0.0 for score in scores])
        grouped = rewards.view(-1, group)
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / (rewards.std() + 1e-4)).flatten().clamp(-5, 5)
        with self.phase("update"):
            size = len(prompts) // self.algorithm.updates_per_rollout
            for rows in torch.randperm(len(prompts)).split(size):
                self.update(rows, trajectory, advantages, text)

    @torch.no_grad()
    def sample(self, prompts: list[str]) -> tuple[dict[int, tuple[torch.Tensor, ...]], np.ndarray, torch.Tensor]:
        run = self.run
        encoder = run.updater.encoder
        tokens = encoder.prepare(prompts, run.updater.guidance)
        text = encoder.conditions(prompts, tokens, run.updater.guidance).conditional.embeddings.float()
        x = torch.randn(len(prompts), run.policy.shape.tokens, run.policy.shape.channels)
        trajectory = {}
        window = range(1, 1 + self.rollout.sde_window_size)
        for step in range(self.rollout.num_inference_steps):
            velocity = torch.cat(
                [self.velocity(x[i : i + CHUNK], step, text[i : i + CHUNK]) for i in range(0, len(x), CHUNK)]
            )
            if step in window:
                mean, std = self.gaussian(x, velocity, step)
                x_next = mean + std * torch.randn_like(x)
                trajectory[step] = (x, x_next, self.log_prob(x_next, mean, std))
                x = x_next
            else:
                x = x + (self.sigmas[step + 1] - self.sigmas[step]) * velocity
        components = encoder.components
        assert components is not None
        height, width = run.settings.model.height, run.settings.model.width
        images = torch.cat([components.decode(part, height, width) for part in x.split(CHUNK)])
        return trajectory, images.numpy(), text

    def update(
        self,
        rows: torch.Tensor,
        trajectory: dict[int, tuple[torch.Tensor, ...]],
        advantages: torch.Tensor,
        text: torch.Tensor,
    ) -> None:
        clip = self.algorithm.clip_range
        for step, (x, x_next, old) in trajectory.items():
            for part in rows.split(CHUNK):
                mean, std = self.gaussian(x[part], self.velocity(x[part], step, text[part]), step)
                ratio = torch.exp(self.log_prob(x_next[part], mean, std) - old[part])
                advantage = advantages[part]
                loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))
                (loss.sum() / (len(rows) * len(trajectory))).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def open_run(threads: int, runs_dir: str, flags: Sequence[str] = ()) -> Run:
    """A run with the quick start's settings that evaluates and saves nothing."""
    settings = load_settings(
        [
            *("--config", "configs/recipes/quick_start.yaml", "--runs-dir", runs_dir, "--no-tensorboard"),
            *("--eval-interval", "0", "--save-interval", "0", "--cpu-threads", str(threads), *flags),
        ]
    )
    get_platform().share_cores(threads, 1)
    return build_run(settings, initialize_once())


def timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--iterations", type=int, default=8, help="timed iterations of each loop")
    parser.add_argument("--threads", type=int, default=2, help="host threads of this process, for both loops")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(arguments.threads, folder)
        try:
            row = compare(run, arguments.iterations)
        finally:
            run.close()
    print(json.dumps(row) if arguments.json else "\n".join(f"{key:32s} {value}" for key, value in row.items()))


def compare(run: Run, iterations: int) -> dict[str, object]:
    """Alternate iterations of both loops; the first of each is a warm-up."""
    plain = PlainLoop(run)
    ours: list[float] = []
    theirs: list[float] = []

    def engine_iteration() -> None:
        train_iteration(run)
        run.iteration += 1

    for number in range(iterations + 1):
        ours.append(timed(engine_iteration))
        theirs.append(timed(lambda number=number: plain.iteration(number)))
        if number == 0:
            run.timers.collect()
            plain.seconds.clear()
    phases = run.timers.collect()
    engine, other = statistics.median(ours[1:]), statistics.median(theirs[1:])
    return {
        "images_per_second_over_plain": round(other / engine, 3),
        "engine_phase_fractions": {
            name.removeprefix("time/"): round(value / sum(ours[1:]), 3)
            for name, value in phases.items()
            if name != "time/elapsed"
        },
        "plain_phase_fractions": {name: round(value / sum(theirs[1:]), 3) for name, value in plain.seconds.items()},
        "images_an_iteration": run.rollout.samples_per_step,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
