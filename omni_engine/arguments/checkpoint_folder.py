# SPDX-License-Identifier: Apache-2.0
"""The one fact of a checkpoint folder that people and settings ask for first: its newest iteration. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

from omni_engine.arguments.settings import Settings

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Megatron's name for the file that holds the number of the newest checkpoint."""


def newest_iteration(root: str | Path) -> int | None:
    """The iteration that the tracker file names; None where there is no tracker file.

    Raises:
        ValueError: the tracker file cannot be read or holds no number.
    """
    file = Path(root) / TRACKER_FILE
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not re.fullmatch(r"\d{1,18}", text):
        raise ValueError(f"{file} should hold the number of an iteration, not '{text[:40]}'; write it there")
    return int(text)


def where_to_continue(settings: Settings) -> str:
    """What is left of a run that has ended early: its newest whole checkpoint, or the one that it was resumed from."""
    for folder in (settings.save_dir, settings.checkpoint.load):
        if folder is None:
            continue
        try:
            iteration = newest_iteration(folder)
        except ValueError as error:
            return f"The last whole checkpoint is not known: {error}."
        if iteration is not None:
            return f"The last whole checkpoint is iteration {iteration}: continue with --load {folder}"
    return f"There is no checkpoint in {settings.save_dir} yet."
