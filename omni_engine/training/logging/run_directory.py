# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: which file lies where, and whether a run may start there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_engine.training.logging.files import LoggingError, explained, make_folder, write_json


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run. Creates nothing by itself; see `open_run_directory`."""

    path: Path

    @property
    def args(self) -> Path:
        """Every setting of the run."""
        return self.path / "args.json"

    @property
    def metrics(self) -> Path:
        """One line of metrics an iteration."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """What came of the run; exists once the run has ended."""
        return self.path / "summary.json"

    @property
    def curve(self) -> Path:
        """The rewards over the iterations."""
        return self.path / "curve.png"

    @property
    def before(self) -> Path:
        """Pictures of the held-out prompts at the first evaluation."""
        return self.path / "before.png"

    @property
    def after(self) -> Path:
        """Pictures of the same prompts at the newest evaluation."""
        return self.path / "after.png"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go unless `--save` says otherwise."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    def samples(self, iteration: int) -> Path:
        """Pictures of the held-out prompts after an iteration."""
        return self.path / "samples" / f"iter_{iteration:07d}.png"

    def holds_a_run(self) -> bool:
        """Whether a run has left anything of worth here. Settings alone (a run that failed to start) are none."""
        has_metrics = self.metrics.exists() and self.metrics.stat().st_size > 0
        return has_metrics or self.holds_checkpoints() or self.summary.exists() or self.before.exists()

    def holds_checkpoints(self) -> bool:
        """Whether anything lies in `checkpoints`."""
        return self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    def write_args(self, settings: Mapping[str, Any]) -> None:
        """Write args.json. Raises `LoggingError`."""
        write_json(self.args, dict(settings))


def open_run_directory(path: Path, *, rank: int, resumed_iteration: int | None = None) -> RunDirectory:
    """The folder of a run, ready to be written to. Only rank 0 touches the disk.

    `resumed_iteration`: the iteration of the checkpoint that the run continues from (`--load`), None for a fresh run.
    Nothing that lies there is changed: that is for `RunLogger`, made once the checkpoint has proved to fit.
    Raises `LoggingError` if a fresh run would write into the folder of another, or if the disk refuses.
    """
    directory = RunDirectory(Path(path))
    if rank != 0:
        return directory
    with explained("look into", directory.path):
        occupied = directory.holds_a_run()
    if occupied and resumed_iteration is None:
        resume = f"continue that run with --load {directory.checkpoints}, " if directory.holds_checkpoints() else ""
        raise LoggingError(
            f"{directory.path} already holds a run, and a fresh run would mix with it. Remedy: choose another "
            f"--run-name, {resume}or delete the folder."
        )
    make_folder(directory.path)
    return directory
