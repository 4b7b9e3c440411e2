# SPDX-License-Identifier: Apache-2.0
"""The pool's end of one worker process: started, asked, killed, started again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np

from .base import RewardError
from .worker import Message, receive, send

START_SECONDS = 120.0
"""For loading all scorers: minutes below a slow disk, far above a healthy start of about a second."""
_EXIT_SECONDS = 5.0
_DYING_SECONDS = 1.0  # from the closing of its socket to its exit code
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"), "1")


class WorkerLost(Exception):
    """The process died, or was killed because it did not answer in time."""

    def __init__(self, reason: str, timed_out: bool) -> None:
        super().__init__(reason)
        self.timed_out = timed_out


class WorkerProcess:
    """One worker. Used by one thread at a time, but for `kill`."""

    def __init__(self, scorers: Sequence[str], picture_size: tuple[int, int]) -> None:
        """Starts the process; `wait_ready` before the first `ask`."""
        self._scorers, self._picture_size = list(scorers), list(picture_size)
        self._process, self._connection = self._start()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        command = "import sys; from omni_engine.reward.worker import main; main(int(sys.argv[1]))"
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # The caller's modules must be found, its own scorers among them.
                env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
            )
        return process, ours

    def wait_ready(self) -> list[str]:
        """The scorers' names, once they are loaded and have been tried. Raises RewardError with the remedy."""
        try:
            answer = self.ask({"scorers": self._scorers, "picture_size": self._picture_size}, None, START_SECONDS)
        except WorkerLost as lost:
            raise RewardError(f"a reward worker did not start: {lost}; its own message is in the log above") from lost
        if "error" in answer:
            raise RewardError(answer["error"])
        names: list[str] = answer["names"]
        return names

    def is_running(self) -> bool:
        return self._process.poll() is None

    def restart(self) -> None:
        """Raises RewardError if the scorers cannot be loaded again."""
        self.stop()
        self._process, self._connection = self._start()
        self.wait_ready()

    def ask(self, message: Message, pixels: np.ndarray | None, timeout: float) -> Message:
        """The worker's answer. Raises WorkerLost, the process being dead then."""
        try:
            send(self._connection, message, pixels)
            if not self._connection.poll(timeout):
                self.kill()
                self._process.wait()
                raise WorkerLost(f"no answer within {timeout:g} s", timed_out=True)
            return receive(self._connection)[0]
        except (EOFError, OSError) as error:
            raise self._lost() from error

    def _lost(self) -> WorkerLost:
        code = self._wait(_DYING_SECONDS)
        return WorkerLost(f"the worker process ended with code {code}", timed_out=False)

    def kill(self) -> None:
        """End it at once, whatever it does. Safe from any thread."""
        self._process.kill()

    def stop(self) -> None:
        """End it, in peace if it is idle. Returns when it is gone."""
        self._connection.close()
        self._wait(_EXIT_SECONDS)

    def _wait(self, seconds: float) -> int:
        """The exit code; the process is killed if it takes longer than that."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()
