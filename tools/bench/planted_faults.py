# SPDX-License-Identifier: Apache-2.0
"""What becomes of the quick start when a fault is planted: which check stops it, or what its reward does.

    python -m tools.bench.planted_faults [--json] [--iterations 20] [--only NAME ...]

Every run starts from the same model, seed and budget. The reward is that of the validation prompts by ODE, before and
after; the held-out prompts are not touched.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from omni_engine.flow import FlowSegment
from omni_engine.models.guidance import Conditions, Guidance
from omni_engine.ops import gaussian_mean
from omni_engine.rollout import RolloutChunk, RolloutRequest
from omni_engine.training import update
from omni_engine.training.loop import train_iteration
from omni_engine.training.optimizer import TrainingError
from omni_engine.training.reference import ReferenceWeights
from omni_engine.training.run import Run
from omni_engine.training.scoring import ScoredBatch
from tools.bench.rl_loop import open_run

Fault = Callable[[Run], AbstractContextManager[Any]]


def wrapped_rewards(change: Callable[[Run, ScoredBatch], ScoredBatch]) -> Fault:
    """A fault in the rewards that reach the trainer."""

    def fault(run: Run) -> AbstractContextManager[Any]:
        collect = run.rewards.collect
        return patch.object(run.rewards, "collect", lambda ids, groups: change(run, collect(ids, groups)))

    return fault


def shuffled_in_group(run: Run, scored: ScoredBatch) -> ScoredBatch:
    grouped = scored.rewards.view(-1, run.rollout.samples_per_prompt)
    order = torch.rand(grouped.shape, generator=torch.Generator().manual_seed(run.iteration)).argsort(1)
    return replace(scored, rewards=grouped.gather(1, order).flatten())


def of_neighbour(run: Run, scored: ScoredBatch) -> ScoredBatch:
    return replace(scored, rewards=scored.rewards.roll(run.rollout.samples_per_prompt))


def sign_flipped(run: Run) -> AbstractContextManager[Any]:
    advantages = run.updater.algorithm.advantages
    return patch.object(run.updater.algorithm, "advantages", lambda *arguments: -advantages(*arguments))


def stale_rollout(run: Run) -> AbstractContextManager[Any]:
    """The rollout keeps the weights of the start while the trainer moves on."""
    frozen, generate = ReferenceWeights(run.policy.parameters()), run.engine.generate

    def stale(request: RolloutRequest) -> Iterator[RolloutChunk]:
        with frozen.in_place():
            chunks = list(generate(request))
        yield from chunks

    return patch.object(run.engine, "generate", stale)


def wrong_step(run: Run) -> AbstractContextManager[Any]:
    table = update.coefficient_table
    return patch.object(update, "coefficient_table", lambda *arguments: table(*arguments).roll(-1, 0))


def other_noise_level(run: Run) -> AbstractContextManager[Any]:
    table = update.coefficient_table
    return patch.object(update, "coefficient_table", lambda s, kind, level, kl: table(s, kind, 1.05 * level, kl))


def fresh_sample(run: Run) -> AbstractContextManager[Any]:
    log_prob, mean = update.gaussian_log_prob, gaussian_mean

    def fresh(x: torch.Tensor, v: torch.Tensor, x_next: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(run.iteration))
        return log_prob(x, v, mean(x, v, rows).detach() + rows[:, 2, None, None].float() * noise, rows)

    return patch.object(update, "gaussian_log_prob", fresh)


def text_of_neighbour(run: Run) -> AbstractContextManager[Any]:
    encoder = run.updater.encoder

    class Neighbour:
        prepare = staticmethod(encoder.prepare)

        @staticmethod
        def conditions(prompts: Sequence[str], tokens: int, guidance: Guidance) -> Conditions:
            shift = run.rollout.samples_per_prompt
            return encoder.conditions([*prompts[shift:], *prompts[:shift]], tokens, guidance)

    return patch.object(run.updater, "encoder", Neighbour)


@contextmanager
def latents_in_bf16(run: Run) -> Iterator[None]:
    """Latents are rounded on their way into the trajectory, after their log-prob was taken."""
    generate = run.engine.generate

    def rounded(segment: FlowSegment) -> FlowSegment:
        return replace(segment, x_t=segment.x_t.bfloat16().float(), x_next=segment.x_next.bfloat16().float())

    def stored(request: RolloutRequest) -> Iterator[RolloutChunk]:
        for chunk in generate(request):
            segments = {name: rounded(segment) for name, segment in chunk.samples.segments.items()}
            yield replace(chunk, samples=replace(chunk.samples, segments=segments))

    with patch.object(run.engine, "generate", stored):
        yield


def ratio_always_one(run: Run) -> AbstractContextManager[Any]:
    loss = run.updater.algorithm.loss
    return patch.object(
        run.updater.algorithm,
        "loss",
        lambda stats, count: loss(replace(stats, old_log_prob=stats.log_prob.detach()), count),
    )


FAULTS: dict[str, Fault] = {
    "none": lambda run: nullcontext(),
    "advantage sign flipped": sign_flipped,
    "rewards shuffled in a group": wrapped_rewards(shuffled_in_group),
    "neighbour's reward": wrapped_rewards(of_neighbour),
    "rollout weights never refreshed": stale_rollout,
    "log-prob of the wrong step": wrong_step,
    "log-prob of a fresh sample": fresh_sample,
    "log-prob of another noise level": other_noise_level,
    "text of a neighbour": text_of_neighbour,
    "latents stored in bf16": latents_in_bf16,
    "ratio always 1": ratio_always_one,
}


def measure(name: str, iterations: int, threads: int) -> dict[str, Any]:
    """One row: what stopped the run, or its rewards."""
    flags = [
        *("--eval-prompts", "assets/prompts/digits_validation.txt", "--eval-interval", "1000"),
        *("--train-iters", str(max(iterations, 1))),
    ]
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(threads, folder, flags)
        try:
            assert run.evaluator is not None
            row: dict[str, Any] = {"fault": name, "reward_before": run.evaluator.run().rewards["reward"]}
            rewards = []
            try:
                with FAULTS[name](run):
                    for _ in range(iterations):
                        rewards.append(train_iteration(run)["reward/mean"])
                        run.iteration += 1
                row |= {
                    "reward_after": run.evaluator.run().rewards["reward"],
                    "train_first_half": sum(rewards[: iterations // 2]) / (iterations // 2),
                    "train_last_half": sum(rewards[iterations // 2 :]) / (iterations - iterations // 2),
                }
            except TrainingError as error:
                row |= {"stopped_in_iteration": run.iteration + 1, "by": str(error)}
        finally:
            run.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    parser.add_argument("--iterations", type=int, default=20, help="iterations of each run, at least 2")
    parser.add_argument("--threads", type=int, default=2, help="host threads")
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS), help="faults to plant")
    arguments = parser.parse_args()
    for name in arguments.only:
        row = measure(name, arguments.iterations, arguments.threads)
        print(
            json.dumps(row) if arguments.json else "  ".join(f"{key}: {value}" for key, value in row.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
