# SPDX-License-Identifier: Apache-2.0
"""Writing the files of a run: whole or not at all, and an error that tells the remedy when the disk refuses."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_REMEDIES = {
    errno.ENOSPC: "the disk is full: free some space, or point --runs-dir at another disk",
    errno.EDQUOT: "your disk quota is used up: free some space, or point --runs-dir at another disk",
    errno.EACCES: "you may not write there: change its permissions, or choose another --runs-dir",
    errno.EPERM: "you may not write there: change its permissions, or choose another --runs-dir",
    errno.EROFS: "that file system is read-only: choose another --runs-dir",
    errno.ENOENT: "its folder is gone: do not move or delete the folder of a run while the run is going",
    errno.ENOTDIR: "a file stands where a folder is needed: move it away, or choose another --run-name",
    errno.EEXIST: "a file stands where a folder is needed: move it away, or choose another --run-name",
}


class LoggingError(RuntimeError):
    """A run cannot be recorded; the message says what failed, where, and the remedy."""


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `LoggingError` that names the action, the path and the remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the disk, then continue the run with --load")
        raise LoggingError(f"could not {action} {path}: {error.strerror or error}. Remedy: {remedy}.") from error


def make_folder(path: Path) -> None:
    """Create the folder and its parents if they are missing. Raises `LoggingError`."""
    with explained("create the folder", path):
        path.mkdir(parents=True, exist_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file by `content`: a reader, or a crash, sees the old file or the new one. Raises `LoggingError`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained("write", path):
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def write_json(path: Path, value: Any) -> None:
    """Replace the file by `value` as indented, strict JSON (see `strict`). Raises `LoggingError`."""
    text = json.dumps(strict(value), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_bytes(path, (text + "\n").encode())


def append_bytes(path: Path, content: bytes) -> None:
    """Append to the file; nothing stays in a buffer when this returns. Raises `LoggingError`."""
    with explained("append to", path), open(path, "ab", buffering=0) as file:
        rest = memoryview(content)
        # An unbuffered write may take only a part (a disk that fills up); the next one then raises.
        while rest:
            rest = rest[file.write(rest) :]


def strict(value: Any) -> Any:
    """The value with NaN and infinities, which JSON has no word for, as the strings that `float()` reads back.

    Mappings and sequences are walked. Floats keep every digit.
    """
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return value
