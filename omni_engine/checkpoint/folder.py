# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's checkpoints on disk: names, the tracker file, complete or not at all.

    ROOT/latest_checkpointed_iteration.txt     number of the newest checkpoint
    ROOT/iter_0000100/                         one checkpoint
    ROOT/.iter_0000100.partial/                being written, or left by a run that was stopped while writing
    ROOT/.iter_0000100.replaced/               its predecessor while it is replaced

A checkpoint takes its name when all of it is on the disk, and the tracker names it after that, so that a crash at any
moment leaves the checkpoint before it in place. ROOT lies on storage that all nodes share.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_engine.arguments.checkpoint_folder import TRACKER_FILE, newest_iteration
from omni_engine.checkpoint.errors import CheckpointError

CHUNK = 2**24


def iteration_folder(root: Path, iteration: int) -> Path:
    """Place of a checkpoint."""
    return root / f"iter_{iteration:07d}"


def partial_folder(root: Path, iteration: int) -> Path:
    """Where a checkpoint is written before it takes its name."""
    return root / f".{iteration_folder(root, iteration).name}.partial"


def _replaced_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def saved_iterations(root: Path) -> list[int]:
    """Iterations of which the root holds a checkpoint, in order."""
    names = (re.fullmatch(r"iter_(\d{7,})", path.name) for path in root.iterdir()) if root.is_dir() else ()
    return sorted(int(name[1]) for name in names if name)


def latest_iteration(root: str | Path) -> int | None:
    """The iteration that the tracker file names; None where there is no tracker file.

    Raises:
        CheckpointError: the tracker file cannot be read or holds no number.
    """
    try:
        return newest_iteration(root)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def find_checkpoint(root: Path, iteration: int | None) -> tuple[int, Path]:
    """Number and folder of a checkpoint, the newest where no iteration is given.

    Raises:
        CheckpointError: there is none; the message says what the root holds instead.
    """
    chosen = latest_iteration(root) if iteration is None else iteration
    saved = saved_iterations(root)
    held = f"{root} holds " + (f"iterations {', '.join(map(str, saved))}" if saved else "no checkpoint")
    if chosen is None:
        if not root.is_dir():
            raise CheckpointError(f"there is no folder {root}; check the path")
        if re.fullmatch(r"iter_\d+", root.name):
            raise CheckpointError(
                f"{root} is one of several checkpoints; give the folder that holds them, {root.parent}"
            )
        remedy = f"; write one of them into {TRACKER_FILE}" if saved else "; check the path"
        raise CheckpointError(f"{root} has no {TRACKER_FILE}, which names the newest checkpoint; {held}{remedy}")
    folder = iteration_folder(root, chosen)
    if not folder.is_dir():
        replaced = _replaced_folder(folder)
        if replaced.is_dir():
            return chosen, replaced
        by = "" if iteration is not None else f", which {TRACKER_FILE} names,"
        raise CheckpointError(f"checkpoint {folder}{by} does not exist; {held}")
    return chosen, folder


def prepare(root: Path, iteration: int) -> Path:
    """Make the empty folder to write into, and clear away what a stopped run left behind."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.glob(".iter_*.partial"):
        shutil.rmtree(path)
    for path in root.glob(".iter_*.replaced"):
        target = root / path.name.removeprefix(".").removesuffix(".replaced")
        if target.exists():
            shutil.rmtree(path)
        else:
            path.rename(target)
    folder = partial_folder(root, iteration)
    folder.mkdir()
    return folder


def publish(root: Path, iteration: int) -> Path:
    """Give a whole checkpoint its name and let the tracker name it. Returns its place."""
    partial, target = partial_folder(root, iteration), iteration_folder(root, iteration)
    _flush_folder(partial)
    replaced = _replaced_folder(target)
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    _flush_folder(root)
    tracker = root / f".{TRACKER_FILE}.partial"
    write_durably(tracker, str(iteration).encode())
    tracker.replace(root / TRACKER_FILE)
    _flush_folder(root)
    shutil.rmtree(replaced, ignore_errors=True)
    return target


def write_durably(file: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _flush_folder(folder: Path) -> None:
    """Flush the names that a folder holds."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(file: Path) -> dict[str, Any]:
    """An object from a JSON file.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist; the checkpoint is incomplete, load another one") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); load another checkpoint") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is damaged: it holds no object; load another checkpoint")
    return content


def checksum(file: Path) -> list[int]:
    """Size in bytes and CRC-32 of a file."""
    size, crc = 0, 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return [size, crc]


def verify_files(folder: Path, expected: Mapping[str, list[int]]) -> None:
    """Compare files with the checksums that were taken when they were written.

    Raises:
        CheckpointError: one is missing, of another size, or changed.
    """
    for name, (size, crc) in expected.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist; the checkpoint is incomplete, load another one")
        found = file.stat().st_size
        if found != size:
            raise CheckpointError(f"{file} has {found} bytes, {size} were written; load another checkpoint")
        if checksum(file) != [size, crc]:
            raise CheckpointError(f"{file} has changed since it was written; load another checkpoint")
