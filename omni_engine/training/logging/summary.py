# SPDX-License-Identifier: Apache-2.0
"""summary.json: what came of a run, and the message that says so to the person who started it."""

from __future__ import annotations

import importlib.metadata
import platform as python_platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omni_engine.training.logging.curve import EVALUATION, HELD_OUT, evaluation_scorers, series
from omni_engine.training.logging.metrics_file import ITERATION, Record
from omni_engine.training.logging.run_directory import RunDirectory
from omni_engine.training.logging.timers import PHASES

FIRST_RATIO = "parity/first_ratio_max_deviation"
"""Metric: largest |ratio - 1| of the first update of an iteration, where policy and rollout are the same weights."""
_PACKAGES = ("omni_engine", "torch", "megatron-core", "diffusers", "transformers", "numpy")


@dataclass(frozen=True)
class BeforeAfter:
    """A held-out mean at the first and at the last evaluation."""

    before: float
    after: float


@dataclass(frozen=True)
class RunSummary:
    """Content of summary.json. None stands for what was never measured. Times in seconds, resumed parts included."""

    held_out_reward_before: float | None
    held_out_reward_after: float | None
    evaluation_scorers: dict[str, BeforeAfter]
    log_prob_gap_max: float | None
    first_ratio_max_deviation: float | None
    iterations: int
    images: int
    seconds_total: float
    seconds_by_phase: dict[str, float]
    images_per_second: float | None
    layout: dict[str, int]
    seed: int
    versions: dict[str, str]


def summarize(
    history: Sequence[Record],
    *,
    layout: Mapping[str, int],
    seed: int,
    images_per_iteration: int,
    times_after: Mapping[str, float] | None = None,
) -> RunSummary:
    """Sum up the lines of metrics.jsonl, those of before a resume included.

    `layout`: parallel axis to degree. `images_per_second` counts the time of training iterations, not of evaluations.
    `times_after`: `PhaseTimers.collect()` at the end, the times that came too late for a line (the last save).
    """
    timed: list[Mapping[str, float]] = [*history, times_after or {}]
    _, held_out = series(history, HELD_OUT)
    trained = [record for record in history if not any(name.startswith(EVALUATION) for name in record)]
    training_seconds = sum(record.get("time/elapsed", 0.0) for record in trained)
    images = len(trained) * images_per_iteration
    return RunSummary(
        held_out_reward_before=held_out[0] if held_out else None,
        held_out_reward_after=held_out[-1] if len(held_out) > 1 else None,
        evaluation_scorers={
            name: values
            for name in evaluation_scorers(history)
            if (values := _before_after(history, EVALUATION + name)) is not None
        },
        log_prob_gap_max=_largest(history, "parity/log_prob_gap_max"),
        first_ratio_max_deviation=_largest(history, FIRST_RATIO),
        iterations=max((int(record[ITERATION]) for record in trained), default=0),
        images=images,
        seconds_total=sum(record.get("time/elapsed", 0.0) for record in timed),
        seconds_by_phase={name: sum(record.get(f"time/{name}", 0.0) for record in timed) for name in PHASES},
        images_per_second=images / training_seconds if training_seconds > 0 else None,
        layout=dict(layout),
        seed=seed,
        versions=_versions(),
    )


def closing_message(summary: RunSummary, directory: RunDirectory, more_places: Sequence[tuple[Path, str]] = ()) -> str:
    """What was gained, what was checked, and where to look: the files that exist, and those of `more_places`."""
    lines = [
        f"Finished: {summary.iterations} iterations, {summary.images} images, {_duration(summary.seconds_total)}.",
        *_gain_lines(summary),
        *_parity_lines(summary),
        "Where to look:",
    ]
    places = (
        (directory.curve, "the rewards over the iterations"),
        (directory.before, "held-out prompts, first evaluation"),
        (directory.after, "the same prompts, last evaluation"),
        (directory.summary, "the numbers above and more"),
        (directory.checkpoints, "to continue: --load this folder"),
        (directory.tensorboard, "tensorboard --logdir this folder"),
        *more_places,
    )
    shown = [(str(path), what) for path, what in places if path.exists()]
    width = max((len(path) for path, _ in shown), default=0)
    return "\n".join(lines + [f"  {path:<{width}}  {what}" for path, what in shown])


def _gain_lines(summary: RunSummary) -> list[str]:
    before, after = summary.held_out_reward_before, summary.held_out_reward_after
    if before is None or after is None:
        return ["The held-out prompts were not evaluated twice, so what was gained is not known (--eval-interval)."]
    lines = [f"Held-out reward: {_change(before, after)}."]
    if not after > before:
        lines.append("The reward of held-out prompts did not rise: the policy is no better than before.")
    return lines + [
        f"Held-out scorer {name}: {_change(values.before, values.after)}."
        for name, values in summary.evaluation_scorers.items()
    ]


def _parity_lines(summary: RunSummary) -> list[str]:
    if summary.log_prob_gap_max is None:
        return []
    if summary.log_prob_gap_max == 0.0:
        return ["Rollout and trainer agreed exactly on every log-prob."]
    return [f"Rollout and trainer differed by at most {summary.log_prob_gap_max:.3g} in a log-prob."]


def _change(before: float, after: float) -> str:
    return f"{before:.4f} before, {after:.4f} after ({after - before:+.4f})"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def _before_after(history: Sequence[Record], metric: str) -> BeforeAfter | None:
    _, values = series(history, metric)
    return BeforeAfter(values[0], values[-1]) if len(values) > 1 else None


def _largest(history: Sequence[Record], metric: str) -> float | None:
    _, values = series(history, metric)
    # Python's max() hides a NaN that is not the first value.
    return next((value for value in values if value != value), max(values, default=None))


def _versions() -> dict[str, str]:
    versions = {"python": python_platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
