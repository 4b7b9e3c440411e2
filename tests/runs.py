# SPDX-License-Identifier: Apache-2.0
"""Runs of the real entry point, as a user starts them, on the repository's tiny model and as small as they come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.helpers import ROOT, kill_tree

MODEL = ROOT / "assets" / "qwen_image_tiny"
TRAIN_PROMPTS = ROOT / "assets" / "prompts" / "digits_train.txt"
VALIDATION_PROMPTS = ROOT / "assets" / "prompts" / "digits_validation.txt"

TINY: dict[str, Any] = {
    "model": MODEL,
    "height": 16,
    "width": 32,
    "train_prompts": TRAIN_PROMPTS,
    "prompts_per_step": 4,
    "samples_per_prompt": 2,
    "num_inference_steps": 3,
    "sde_window_size": 1,
    "sde_window_range": (0, 2),
    "updates_per_rollout": 2,
    "micro_batch_size": 2,
    "lr": 1e-3,
    "run_name": "run",
    "tensorboard": False,
}
HANGS_AFTER = 900
"""Seconds after which a run counts as hanging: far above what a busy machine needs, so it measures no speed."""


def flags(folder: Path, changes: Mapping[str, Any] | None = None) -> list[str]:
    """The command line of a tiny run that writes into `folder`/run; `changes` replace or add settings."""
    line = []
    for name, value in ({**TINY, "runs_dir": folder} | dict(changes or {})).items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            line.append(f"--{option}" if value else f"--no-{option}")
        else:
            line += [f"--{option}", *map(str, value if isinstance(value, tuple) else (value,))]
    return line


class Job:
    """A run started by scripts/pretrain_flowgrpo.sh. Use it in a `with`: nothing of it is left behind."""

    def __init__(self, arguments: Sequence[str], processes: int | None = 1, cwd: Path = ROOT) -> None:
        """`processes`: None leaves their number to the script."""
        ours = {"OMNI_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        if processes is not None:
            ours["NPROC_PER_NODE"] = str(processes)
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            ["bash", str(ROOT / "scripts" / "pretrain_flowgrpo.sh"), *arguments],
            cwd=cwd,
            env=os.environ | ours,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self._lines.extend(lines)

    @property
    def text(self) -> str:
        """What all its processes have printed so far."""
        return "".join(self._lines)

    def family(self) -> dict[int, psutil.Process]:
        """All its processes by number, the scorers' included."""
        launcher = psutil.Process(self.process.pid)
        return {member.pid: member for member in (launcher, *launcher.children(recursive=True))}

    def ranks(self) -> dict[int, psutil.Process]:
        """Its trainer processes by rank."""
        launcher = psutil.Process(self.process.pid)
        return {int(child.environ()["RANK"]): child for child in launcher.children()}

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Wait for something that the run does while it goes on."""
        deadline = time.monotonic() + HANGS_AFTER
        while not is_true():
            assert self.process.poll() is None, f"the run ended with {self.process.returncode}:\n{self.text[-4000:]}"
            assert time.monotonic() < deadline, f"the run does not get there:\n{self.text[-4000:]}"
            time.sleep(0.02)

    def end(self, within: float = HANGS_AFTER) -> int:
        """Wait for its end and return its status."""
        try:
            status = self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run has not ended after {within} s:\n{self.text[-4000:]}") from None
        self._reader.join(10)
        return status

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kill_tree(self.process.pid)
        self.process.wait()
        self._reader.join(10)


def finished(arguments: Sequence[str], processes: int | None = 1, cwd: Path = ROOT) -> tuple[int, str]:
    """Status and output of a run that is left to itself."""
    with Job(arguments, processes, cwd) as job:
        return job.end(), job.text


def succeeded(arguments: Sequence[str], processes: int | None = 1) -> str:
    """Output of a run that must end well."""
    status, text = finished(arguments, processes)
    assert status == 0, text[-6000:]
    return text


def metrics(run: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics.jsonl, which may be growing."""
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def iterations(run: Path) -> int:
    """Iterations that a run has finished."""
    return max((record["iteration"] for record in metrics(run)), default=0)
