# SPDX-License-Identifier: Apache-2.0
"""Dashboards a run reports to: TensorBoard and, if asked for, Weights & Biases."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from omni_engine.training.logging.files import LoggingError, explained


class Tracker(Protocol):
    """One dashboard."""

    def scalars(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Report the metrics of an iteration."""

    def picture(self, iteration: int, name: str, picture: npt.NDArray[np.uint8]) -> None:
        """Report one picture, uint8 [height, width, 3]."""

    def close(self) -> None:
        """Send what is still waiting."""


class TensorBoardTracker:
    """Event files in `folder`. On resume, events of iterations after `resumed_iteration` are hidden."""

    def __init__(self, folder: Path, resumed_iteration: int | None) -> None:
        _require("tensorboard", "--no-tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resumed_iteration is None else resumed_iteration + 1
        self._folder = folder
        with explained("write TensorBoard events to", folder):
            self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step)

    def scalars(self, iteration: int, metrics: Mapping[str, float]) -> None:
        with explained("write TensorBoard events to", self._folder):
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, iteration)
            self._writer.flush()

    def picture(self, iteration: int, name: str, picture: npt.NDArray[np.uint8]) -> None:
        with explained("write TensorBoard events to", self._folder):
            self._writer.add_image(name, picture, iteration, dataformats="HWC")
            self._writer.flush()

    def close(self) -> None:
        with explained("write TensorBoard events to", self._folder):
            self._writer.close()


class WandbTracker:
    """A run named after the run's folder in a Weights & Biases project."""

    def __init__(self, project: str, folder: Path) -> None:
        self._wandb = _require("wandb", "--wandb-project")
        self._run: Any = self._wandb.init(project=project, name=folder.name, dir=str(folder))
        # Metrics are placed by iteration, not by W&B's own step: that one may not go back, as a resumed run does.
        self._run.define_metric("*", step_metric="iteration")

    def scalars(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"iteration": iteration, **metrics})

    def picture(self, iteration: int, name: str, picture: npt.NDArray[np.uint8]) -> None:
        self._run.log({"iteration": iteration, name: self._wandb.Image(picture)})

    def close(self) -> None:
        self._run.finish()


def _require(package: str, flag: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        advice = f"pass {flag}" if flag.startswith("--no-") else f"leave out {flag}"
        raise LoggingError(
            f"the package {package} cannot be imported ({error}). Remedy: pip install {package}, or {advice}."
        ) from error
