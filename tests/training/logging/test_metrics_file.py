# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl says exactly what was measured, to any JSON reader, whenever the run was cut and resumed.

Does not cover a power loss: lines are handed to the operating system, not forced to the disk.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NoReturn

import pytest

from omni_engine.training.logging.files import LoggingError
from omni_engine.training.logging.metrics_file import append_record, drop_records_after, make_record, read_records

pytestmark = pytest.mark.fast


def _refuse(word: str) -> NoReturn:
    raise AssertionError(f"{word} is not JSON")


def test_every_bit_of_a_float_survives(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = {"a": 0.1 + 0.2, "b": 1e-300, "c": 1 / 3, "d": -0.0}
    append_record(path, make_record(7, values))
    assert read_records(path) == [{"iteration": 7, **values}]


def test_lines_are_strict_json_with_sorted_keys_and_keep_what_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_record(path, make_record(1, {"z": math.nan, "a": math.inf, "b": -math.inf}))
    line = json.loads(path.read_text(), parse_constant=_refuse)
    assert list(line) == ["a", "b", "iteration", "z"]
    (record,) = read_records(path)
    assert math.isnan(record["z"]) and record["a"] == math.inf and record["b"] == -math.inf


def test_a_resumed_run_keeps_its_past_and_forgets_later_iterations(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for iteration in range(6):
        append_record(path, make_record(iteration, {"reward/mean": iteration / 7}))
    past = path.read_bytes().splitlines(keepends=True)[:4]
    assert drop_records_after(path, 3) == 2
    assert path.read_bytes() == b"".join(past)


def test_a_line_cut_by_a_crash_is_dropped_and_a_broken_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_record(path, make_record(1, {"x": 1.0}))
    with open(path, "ab") as file:
        file.write(b'{"iteration": 2, "x"')
    assert drop_records_after(path, 5) == 0
    assert [record["iteration"] for record in read_records(path)] == [1]
    with open(path, "ab") as file:
        file.write(b"nonsense\n")
    with pytest.raises(LoggingError, match=r"line 2.*Remedy"):
        read_records(path)


def test_a_metric_may_not_take_the_place_of_the_iteration() -> None:
    with pytest.raises(ValueError, match="iteration"):
        make_record(1, {"iteration": 2.0})
