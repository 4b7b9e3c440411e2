# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of itself in `state.json`, read without its tensors and without a process group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_engine.checkpoint import folder as disk
from omni_engine.checkpoint.errors import CheckpointError

FORMAT = 1
STATE_FILE = "state.json"


@dataclass(frozen=True)
class LoadedState:
    """Where a run stood: the iteration it had finished, and the state its caller gave to `save_checkpoint`."""

    iteration: int
    state: dict[str, Any]


class SavedRun:
    """A checkpoint's folder and what stands in `state.json`.

    Attributes:
        lora: rank, alpha and target modules where the weights are those of adapters; None where they are all of them.
    """

    def __init__(self, root: Path, iteration: int | None):
        number, self.folder = disk.find_checkpoint(root, iteration)
        file = self.folder / STATE_FILE
        record = disk.read_json(file)
        if record.get("format") != FORMAT:
            raise CheckpointError(
                f"{file} is of format {record.get('format')}, this version reads format {FORMAT}; resume with the "
                "version that wrote it"
            )
        try:
            self.loaded = LoadedState(int(record["iteration"]), dict(record["state"]))
            self.weight_version = int(record["weight_version"])
            self.adam_step = int(record["adam_step"])
            self.scheduler_steps = int(record["scheduler_steps"])
            self.lora = _read_lora(record.get("lora"))
            self.files = {str(name): [int(size), int(crc)] for name, (size, crc) in record["files"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{file} is damaged ({error!r}); load another checkpoint") from error
        if self.loaded.iteration != number:
            raise CheckpointError(f"{file} is of iteration {self.loaded.iteration}; the folder was renamed")


def _read_lora(lora: Any) -> dict[str, Any] | None:
    if lora is None:
        return None
    targets = [str(target) for target in lora["target_modules"]]
    return {"rank": int(lora["rank"]), "alpha": float(lora["alpha"]), "target_modules": targets}


def read_state(root: str | Path, iteration: int | None = None) -> LoadedState:
    """The iteration and the caller's state of a checkpoint, without its tensors: enough to refuse a run early.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    return SavedRun(Path(root), iteration).loaded


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to continue another run: every value of `now` has to be that of the saved state.

    Args:
        saved: the state of a checkpoint.
        now: what makes a run the same run, such as its seed and the hash of its prompts; values that JSON holds. What
            was not saved counts as None.

    Raises:
        CheckpointError: values differ; all of them are named.
    """
    plain = json.loads(json.dumps(dict(now)))
    faults = [
        f"{name} was {saved[name]!r} and is {value!r}" if name in saved else f"{name} was not saved and is {value!r}"
        for name, value in plain.items()
        if saved.get(name) != value
    ]
    if faults:
        raise CheckpointError(
            "the checkpoint is of another run: "
            + "; ".join(faults)
            + ". Set them as they were, or start a new run from an exported model"
        )
