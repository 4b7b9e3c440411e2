# SPDX-License-Identifier: Apache-2.0
"""Spreads pictures over worker processes, survives their faults, and brings the scorers' values together.

A picture's way: `submit` cuts the batch into tasks of some pictures for one scorer; a thread a worker takes the next
task, waits for the answer, and writes it into the handle. What failed goes back to the queue, `reward_retries` times:
one picture at a time where the scorer raised or died, so that one bad picture does not take its neighbours along, and
all together where it was too slow.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from .base import Failure, Reward, RewardError, Score
from .process import WorkerLost, WorkerProcess
from .worker import Message

if TYPE_CHECKING:
    from omni_engine.arguments import RewardSettings

TASK_PICTURES = 16
"""At most, in one task: enough to fill a recogniser's batch, few enough to keep several workers busy."""
TASK_PIXELS = 2**20
"""At most, in one task of several pictures: four of 512 x 512 take a text detector two seconds on one core."""


@dataclass(frozen=True)
class _Task:
    handle: RewardHandle
    scorer: int
    members: list[int]  # rows of the handle's pictures
    tries: int = 0


class RewardHandle:
    """The rewards of one `submit`, to come."""

    def __init__(self, images: np.ndarray, prompts: list[str], names: list[str], weights: list[float]) -> None:
        """`names` are the scorers asked; those beyond `weights` only watch."""
        self._images, self._prompts, self._names, self._weights = images, prompts, names, weights
        self._results: list[dict[str, Score | Failure]] = [{} for _ in prompts]
        self._missing = len(prompts) * len(names)  # counted down by several threads
        self._error: RewardError | None = None
        self._lock = threading.Lock()
        self._finished = threading.Event()
        if not self._missing:
            self._finished.set()

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._finished.is_set()

    def result(self) -> list[Reward]:
        """One Reward a picture, in the order of `submit`. Waits; every task has its timeout, so not for ever.

        Raises RewardError if a scorer broke its contract, the workers could not be kept alive, or the pool was closed.
        """
        self._finished.wait()
        if self._error is not None:
            raise self._error
        return [self._combined(results) for results in self._results]

    def _combined(self, results: dict[str, Score | Failure]) -> Reward:
        ordered = [(name, results[name]) for name in self._names]
        scores = {name: result for name, result in ordered if isinstance(result, Score)}
        failures = [f"{name}: {result.reason}" for name, result in ordered if isinstance(result, Failure)]
        weighted = dict(zip(self._names, self._weights, strict=False))
        complete = all(name in scores for name in weighted)
        return Reward(
            value=math.fsum(weight * scores[name].value for name, weight in weighted.items()) if complete else None,
            parts={name: score.value for name, score in scores.items()},
            texts={name: score.text for name, score in scores.items()},
            failure="; ".join(failures) or None,
        )

    def _request(self, task: _Task) -> tuple[Message, np.ndarray]:
        pixels = self._images[task.members]
        prompts = [self._prompts[i] for i in task.members]
        return {"scorer": task.scorer, "prompts": prompts, "shape": pixels.shape}, pixels

    def _record(self, task: _Task, member: int, result: Score | Failure) -> None:
        with self._lock:
            self._results[member][self._names[task.scorer]] = result
            self._missing -= 1
            if not self._missing:
                self._images = self._images[:0].copy()  # they may be large, and the handle may live on
                self._finished.set()

    def _fail(self, error: RewardError) -> None:
        with self._lock:
            if not self._finished.is_set():
                self._error = error
                self._finished.set()


class RewardPool:
    """`settings.reward_workers` processes, each holding all scorers. Use it in a `with`, or call `close`."""

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float],
        settings: RewardSettings,
        *,
        watchers: Sequence[str] = (),
        picture_size: tuple[int, int] = (64, 64),
    ) -> None:
        """`names` are registered names or `package.module:Class`, weighted by `weights`; `watchers` have no weight.

        Returns when every worker has loaded every scorer and tried it on a blank picture of `picture_size` (H, W), so
        give the size of the run: a missing package or model file is told here.
        Raises RewardError, with the remedy, for a scorer that does not work.
        """
        if not names or len(names) != len(weights):
            raise ValueError(f"a reward pool needs scorers and a weight for each: {list(names)}, {list(weights)}")
        self._weights = [float(weight) for weight in weights]
        self._timeout, self._retries = settings.reward_timeout, settings.reward_retries
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: set[RewardHandle] = set()
        self._counters: Counter[str] = Counter()
        self._closed: str | None = None
        self._workers = [WorkerProcess([*names, *watchers], picture_size) for _ in range(settings.reward_workers)]
        try:
            for worker in self._workers:
                self._names = worker.wait_ready()
            if len(set(self._names)) < len(self._names):
                raise RewardError(f"two of the scorers have one name: {self._names}; give each its own `name`")
        except BaseException:
            for worker in self._workers:
                worker.kill()
                worker.stop()
            raise
        self._threads = [threading.Thread(target=self._serve, args=(worker,), daemon=True) for worker in self._workers]
        for thread in self._threads:
            thread.start()

    @property
    def weighted(self) -> list[str]:
        """Names of the scorers that make up the reward."""
        return self._names[: len(self._weights)]

    def submit(self, images: np.ndarray, prompts: Sequence[str], *, watch: bool = False) -> RewardHandle:
        """Score uint8 RGB `images` [B, H, W, 3], one prompt each, while the caller goes on.

        `watch` asks the watchers too. The pictures are copied.
        Raises ValueError for another shape or dtype, RewardError if the pool is closed.
        """
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or len(images) != len(prompts):
            raise ValueError(
                f"rewards need uint8 pictures [B, H, W, 3] and B prompts, got {images.dtype} {list(images.shape)} "
                f"and {len(prompts)} prompts"
            )
        asked = self._names if watch else self.weighted
        handle = RewardHandle(np.array(images, order="C"), list(prompts), asked, self._weights)
        with self._lock:
            if self._closed is not None:
                raise RewardError(self._closed)
            self._pending = {other for other in self._pending if not other.done()} | {handle}
        height, width = images.shape[1:3]
        size = max(1, min(TASK_PICTURES, TASK_PIXELS // max(1, height * width)))
        for start in range(0, len(images), size):
            members = list(range(start, min(start + size, len(images))))
            for scorer in range(len(asked)):
                self._queue.put(_Task(handle, scorer, members))
        return handle

    def counters(self) -> dict[str, int]:
        """Faults so far: pictures tried again, pictures given up, calls that timed out, workers restarted."""
        with self._lock:
            return {key: self._counters[key] for key in ("retries", "failures", "timeouts", "restarts")}

    def close(self) -> None:
        """End the workers; handles that are not done raise. May be called twice."""
        self._stop("the reward pool is closed")
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stop(self, reason: str) -> None:
        """Accept nothing more, fail what is pending, and let the threads end."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = reason
            pending = [handle for handle in self._pending if not handle.done()]
        for handle in pending:
            handle._fail(RewardError(reason))
        if pending:  # what is being scored has nobody waiting for it
            for worker in self._workers:
                worker.kill()
        for _ in self._workers:
            self._queue.put(None)

    def _serve(self, worker: WorkerProcess) -> None:
        """The thread of one worker."""
        try:
            while (task := self._queue.get()) is not None:
                if not task.handle.done():
                    self._run(worker, task)
        except RewardError as error:
            self._stop(str(error))
        except BaseException as error:  # a fault of ours must not leave `result` waiting
            self._stop(f"a thread of the reward pool failed: {type(error).__name__}: {error}")
            raise
        finally:
            worker.stop()

    def _run(self, worker: WorkerProcess, task: _Task) -> None:
        if not worker.is_running():  # it died idle: no fault of this task
            self._restart(worker)
        try:
            answer = worker.ask(*task.handle._request(task), self._timeout)
        except WorkerLost as lost:
            self._count("timeouts", int(lost.timed_out))
            self._give_back(task, dict.fromkeys(task.members, Failure(str(lost))), together=lost.timed_out)
            return
        if "error" in answer:
            task.handle._fail(RewardError(answer["error"]))
            return
        if "exception" in answer:
            self._give_back(task, dict.fromkeys(task.members, Failure(answer["exception"])), together=False)
            return
        failures = {}
        for member, result in zip(task.members, answer["results"], strict=True):
            if "failure" in result:
                failures[member] = Failure(result["failure"])
            else:
                task.handle._record(task, member, Score(result["value"], result["text"]))
        self._give_back(task, failures, together=True)

    def _give_back(self, task: _Task, failures: dict[int, Failure], together: bool) -> None:
        """Try the failed pictures again, or give them up."""
        members = list(failures)
        if task.tries < self._retries:
            self._count("retries", len(members))
            for part in [members] if together else [[member] for member in members]:
                if part:
                    self._queue.put(_Task(task.handle, task.scorer, part, task.tries + 1))
            return
        self._count("failures", len(members))
        for member, failure in failures.items():
            task.handle._record(task, member, failure)

    def _restart(self, worker: WorkerProcess) -> None:
        if self._closed is None:
            self._count("restarts", 1)
            worker.restart()

    def _count(self, key: str, amount: int) -> None:
        with self._lock:
            self._counters[key] += amount
