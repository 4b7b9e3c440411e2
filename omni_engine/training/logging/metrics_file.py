# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl: one JSON object a line, `{"iteration": 3, "reward/mean": 0.41, ...}`, keys sorted.

An iteration has one line of training metrics; an iteration after which the held-out prompts were drawn has a further
line with the `eval/...` rewards (iteration 0: before training). NaN and infinities stand as the strings "NaN",
"Infinity" and "-Infinity", which Python's `float()` reads, so that every JSON reader can read the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from omni_engine.training.logging.files import LoggingError, append_bytes, explained, strict, write_bytes

Record = dict[str, float]
"""One line: metric name to value, and "iteration" (a whole number)."""

ITERATION = "iteration"


def make_record(iteration: int, metrics: Mapping[str, float]) -> Record:
    """Line of an iteration. Values may be anything `float()` takes (Python, NumPy or one-element tensors).

    Raises `ValueError` for a metric that is named "iteration".
    """
    if ITERATION in metrics:
        raise ValueError(f'a metric may not be named "{ITERATION}": that key holds the number of the iteration')
    return {ITERATION: iteration, **{name: float(value) for name, value in metrics.items()}}


def append_record(path: Path, record: Record) -> None:
    """Add one line at the end of the file. Raises `LoggingError`."""
    append_bytes(path, _encode(record))


def read_records(path: Path) -> list[Record]:
    """All lines of the file, in order; none if there is no file.

    A last line without its line end was cut by a crash and is left out. Raises `LoggingError` for any other line that
    is not a record.
    """
    if not path.exists():
        return []
    with explained("read", path):
        lines = path.read_bytes().split(b"\n")
    return [_decode(line, path, number) for number, line in enumerate(lines[:-1], start=1)]


def drop_records_after(path: Path, iteration: int) -> int:
    """Keep the lines up to and including `iteration`; returns how many were dropped. Raises `LoggingError`."""
    records = read_records(path)
    kept = [record for record in records if record[ITERATION] <= iteration]
    if path.exists():
        write_bytes(path, b"".join(_encode(record) for record in kept))
    return len(records) - len(kept)


def _encode(record: Record) -> bytes:
    return (json.dumps(strict(record), sort_keys=True, allow_nan=False) + "\n").encode()


def _decode(line: bytes, path: Path, number: int) -> Record:
    try:
        values = json.loads(line)
        return {key: value if key == ITERATION else float(value) for key, value in values.items()} | {
            ITERATION: int(values[ITERATION])
        }
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise LoggingError(
            f"{path}, line {number}, is not a line of metrics ({error}). Remedy: mend or delete that line, "
            "or start under another --run-name."
        ) from error
