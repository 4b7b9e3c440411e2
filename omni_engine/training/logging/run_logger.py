# SPDX-License-Identifier: Apache-2.0
"""What a run tells: its log lines, metrics file, dashboards, pictures, curve and summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from omni_engine.training.logging.curve import EVALUATION, HELD_OUT, write_curve
from omni_engine.training.logging.files import explained, make_folder, write_json
from omni_engine.training.logging.log_line import evaluation_line, iteration_line
from omni_engine.training.logging.metrics_file import (
    Record,
    append_record,
    drop_records_after,
    make_record,
    read_records,
)
from omni_engine.training.logging.pictures import picture_grid, write_png
from omni_engine.training.logging.progress import Progress
from omni_engine.training.logging.run_directory import RunDirectory
from omni_engine.training.logging.summary import RunSummary, closing_message
from omni_engine.training.logging.trackers import TensorBoardTracker, Tracker, WandbTracker

if TYPE_CHECKING:
    from omni_engine.arguments.logging import LoggingSettings


class RunLogger:
    """Records a run in its folder. All ranks make one and call it alike; only that of rank 0 does anything.

    Make it before the work begins: a missing package or a folder that cannot be written to is an error here.
    `resumed_iteration`: as given to `open_run_directory`. A resumed run forgets what its folder says of later
    iterations, which it computes again, and the summary of its past.
    All methods raise `LoggingError` if the disk refuses, and `ValueError` for arguments that do not fit together.
    """

    def __init__(
        self, run_dir: RunDirectory, settings: LoggingSettings, rank: int, resumed_iteration: int | None = None
    ) -> None:
        self._directory = run_dir
        self._settings = settings
        self._active = rank == 0
        self._history: list[Record] = []
        self._unprinted: list[Record] = []
        self._held_out_prompts: list[str] | None = None
        self._trackers: list[Tracker] = []
        self._progress = Progress(False)
        if not self._active:
            return
        make_folder(run_dir.path)
        if resumed_iteration is not None:
            drop_records_after(run_dir.metrics, resumed_iteration)
            with explained("remove the outdated", run_dir.summary):
                run_dir.summary.unlink(missing_ok=True)
        self._history = read_records(run_dir.metrics)
        if settings.tensorboard:
            self._trackers.append(TensorBoardTracker(run_dir.tensorboard, resumed_iteration))
        if settings.wandb_project:
            self._trackers.append(WandbTracker(settings.wandb_project, run_dir.path))
        self._progress = Progress({"auto": None, "always": True, "never": False}[settings.progress_bar])

    @property
    def history(self) -> Sequence[Record]:
        """The lines of metrics.jsonl so far, those of before a resume included; empty on other ranks than 0."""
        return self._history

    def start(self, iteration: int, total_iterations: int) -> None:
        """Show the progress bar, with `iteration` iterations done. Without this it appears after the first one."""
        if self._active:
            self._progress.start(iteration, total_iterations)

    def phase(self, name: str) -> None:
        """Show on the bar what is going on (to be handed to `PhaseTimers`)."""
        self._progress.phase(name)

    def message(self, text: str) -> None:
        """Print a text on rank 0, without breaking the progress bar."""
        if self._active:
            self._progress.print(text)

    def log(self, iteration: int, metrics: Mapping[str, float], total_iterations: int) -> None:
        """Record a finished training iteration, counted from 1.

        The metrics file gets every iteration; the line and the dashboards get every `--log-interval`-th and the last.
        """
        if not self._active:
            return
        record = make_record(iteration, metrics)
        self._record(record)
        self._unprinted.append(record)
        self._progress.start(iteration - 1, total_iterations)
        self._progress.advance(iteration, record.get("reward/mean"))
        if iteration % self._settings.log_interval == 0 or iteration == total_iterations:
            self._progress.print(iteration_line(self._unprinted, total_iterations))
            self._unprinted.clear()
            self._report(iteration, metrics)

    def log_eval(
        self,
        iteration: int,
        rewards: Mapping[str, float],
        images: npt.NDArray[np.uint8],
        prompts: Sequence[str],
        captions: Sequence[str] | None = None,
        times: Mapping[str, float] | None = None,
    ) -> None:
        """Record an evaluation of the held-out prompts after `iteration` iterations (0: before training).

        `rewards`: means over the prompts; "reward" is the reward that is trained on, other names are scorers that
        only watch. `images` uint8 [n, height, width, 3], one for each of the n `prompts`, which must be the same at
        every evaluation. `captions` stand under the pictures instead of the prompts. `times`: `PhaseTimers.collect()`.
        """
        if not self._active:
            return
        if "reward" not in rewards:
            raise ValueError(f'rewards lack "reward", the mean of the trained reward; they hold {sorted(rewards)}')
        if self._held_out_prompts not in (None, list(prompts)):
            raise ValueError("the held-out prompts changed between two evaluations, so their pictures do not compare")
        self._held_out_prompts = list(prompts)
        metrics = {EVALUATION + name: float(value) for name, value in rewards.items()} | dict(times or {})
        self._record(make_record(iteration, metrics))
        self._progress.print(evaluation_line(iteration, {name: float(value) for name, value in rewards.items()}))
        self._report(iteration, metrics)
        title = f"iteration {iteration}, held-out reward {metrics[HELD_OUT]:.4f}"
        self._draw(iteration, picture_grid(images, prompts, title, captions))

    def finish(self, summary: RunSummary, more_places: Sequence[tuple[Path, str]] = ()) -> None:
        """Write summary.json, draw the curve a last time and print the closing message.

        `more_places`: paths outside the folder of the run, each with what lies there (an exported pipeline).
        """
        if self._active:
            write_json(self._directory.summary, asdict(summary))
            self._draw_curve()
            self._progress.close()
            self._progress.print(closing_message(summary, self._directory, more_places))

    def close(self) -> None:
        """Send what is waiting and take the bar away. To be called also after an error; may be called twice."""
        self._progress.close()
        while self._trackers:
            self._trackers.pop().close()

    def _record(self, record: Record) -> None:
        append_record(self._directory.metrics, record)
        self._history.append(record)

    def _report(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.scalars(iteration, metrics)

    def _draw(self, iteration: int, grid: npt.NDArray[np.uint8]) -> None:
        path = self._directory.samples(iteration)
        make_folder(path.parent)
        write_png(path, grid)
        if iteration == 0 or not self._directory.before.exists():
            write_png(self._directory.before, grid)
        write_png(self._directory.after, grid)
        for tracker in self._trackers:
            tracker.picture(iteration, "eval/pictures", grid)
        self._draw_curve()

    def _draw_curve(self) -> None:
        write_curve(self._directory.curve, self._history, f"Reward of run {self._directory.path.name}")
