# SPDX-License-Identifier: Apache-2.0
"""Many cases in one launch: starting the processes costs more than a case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers import run_torchrun
from tools.bench.parity import Rank, read_ranks


class Launches:
    """Runs a worker on as many processes as are asked for, once, when the first of its results is wanted."""

    def __init__(self, program: str | Path, folder: Path, arguments: Mapping[int, Sequence[str]], timeout: float):
        """`arguments` of the worker by number of processes; the folder goes before them."""
        self.program, self.folder, self.arguments, self.timeout = program, folder, arguments, timeout
        self.failures: dict[int, str] = {}
        self.done: set[int] = set()

    def ranks(self, processes: int, name: str, case: str) -> list[Rank]:
        """What the ranks have left in FOLDER/NAME/CASE.RANK.safetensors.

        Raises:
            AssertionError: the launch has failed, or was not done in time.
        """
        if processes not in self.done:
            self.done.add(processes)
            self.failures[processes] = "the launch was not done in time"
            arguments = [str(self.folder), *self.arguments[processes]]
            result = run_torchrun(
                self.program, processes, *arguments, env={"OMNI_PLATFORM": "cpu"}, timeout=self.timeout
            )
            self.failures[processes] = result.stderr[-6000:] if result.returncode else ""
        assert not self.failures[processes], self.failures[processes]
        ranks = read_ranks(self.folder / name, case)
        assert len(ranks) == processes
        return ranks
