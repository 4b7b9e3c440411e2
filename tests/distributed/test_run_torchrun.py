# SPDX-License-Identifier: Apache-2.0
"""`run_torchrun` gives every rank's output and leaves no process behind, not even of a program that hangs."""

from __future__ import annotations

import re
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import run_torchrun

HANGS = """
import os, time
print(f"pid={os.getpid()} rank={os.environ['RANK']}", flush=True)
time.sleep(300)
"""


def test_output_and_exit_status_of_the_ranks_come_back(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, sys\nprint('rank', os.environ['RANK'], *sys.argv[1:])\n")
    finished = run_torchrun(program, 2, "--flag", "7")
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.split("\n")[:2]) == ["rank 0 --flag 7", "rank 1 --flag 7"]

    program.write_text("import sys\nsys.exit(3)\n")
    assert run_torchrun(program, 2).returncode != 0


def test_program_that_hangs_is_killed_with_all_its_ranks(tmp_path: Path) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(HANGS)
    with pytest.raises(AssertionError, match="did not end") as caught:
        run_torchrun(program, 2, timeout=20)
    pids = [int(pid) for pid in re.findall(r"pid=(\d+)", str(caught.value))]
    assert len(pids) == 2
    for _ in range(50):
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return
        time.sleep(0.1)
    pytest.fail(f"ranks {pids} are still running")
