# SPDX-License-Identifier: Apache-2.0
"""Two runs never mix in one folder.

Does not cover two runs that start in one empty folder at the same moment, nor a resume from the checkpoint of
another run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_engine.training.logging import LoggingError, open_run_directory
from omni_engine.training.logging.metrics_file import append_record, make_record, read_records

pytestmark = pytest.mark.fast


def test_a_fresh_run_is_refused_where_a_run_lies(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a"
    directory = open_run_directory(path, rank=0)
    append_record(directory.metrics, make_record(1, {}))
    with pytest.raises(LoggingError, match=r"already holds a run.*Remedy: choose another --run-name, or delete"):
        open_run_directory(path, rank=0)
    (directory.checkpoints / "iter_0000001").mkdir(parents=True)
    with pytest.raises(LoggingError, match=r"--load .*runs/a/checkpoints"):
        open_run_directory(path, rank=0)


def test_a_run_that_failed_to_start_does_not_block_its_name(tmp_path: Path) -> None:
    open_run_directory(tmp_path / "a", rank=0).write_args({"training": {"seed": 1}})
    open_run_directory(tmp_path / "a", rank=0)


def test_a_resumed_run_may_enter_and_changes_nothing_before_its_checkpoint_proved_to_fit(tmp_path: Path) -> None:
    directory = open_run_directory(tmp_path / "a", rank=0)
    for iteration in (1, 2, 3):
        append_record(directory.metrics, make_record(iteration, {}))
    open_run_directory(tmp_path / "a", rank=0, resumed_iteration=2)
    assert [record["iteration"] for record in read_records(directory.metrics)] == [1, 2, 3]


def test_other_ranks_leave_the_disk_alone(tmp_path: Path) -> None:
    open_run_directory(tmp_path / "a", rank=1)
    assert not list(tmp_path.iterdir())
