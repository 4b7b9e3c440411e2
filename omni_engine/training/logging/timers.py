# SPDX-License-Identifier: Apache-2.0
"""Where the time of an iteration goes, phase by phase.

Not built on `megatron.core.timers`: its timers call `torch.cuda.synchronize()` themselves, so they need an NVIDIA
device, and they read the wall clock, which may jump.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

PHASES = ("rollout", "reward_wait", "old_log_prob", "reference", "update", "weight_sync", "validate", "save")


class PhaseTimers:
    """Adds up the seconds of each phase until they are collected.

    `synchronize` waits for the device (`platform.synchronize`), so that queued work counts where it was asked for.
    `on_phase` is told the name of a phase that begins (a progress bar). `named_range` opens a range of that name in a
    profiler's trace.

        with timers.phase("rollout"):
            ...
        logger.log(iteration, metrics | timers.collect(), total_iterations)
    """

    def __init__(
        self,
        synchronize: Callable[[], None],
        on_phase: Callable[[str], None] | None = None,
        named_range: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._synchronize = synchronize
        self._on_phase = on_phase
        self._named_range = named_range
        self._seconds: dict[str, float] = {}
        self._running: str | None = None
        self._collected_at = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block. Raises `ValueError` for an unknown phase, or inside another one: its time would count twice.

        A block that raises is not counted and not waited for: the device may never answer again.
        """
        if name not in PHASES:
            raise ValueError(f"there is no phase {name!r}; the phases are {', '.join(PHASES)}")
        if self._running is not None:
            raise ValueError(f"phase {name!r} begins inside phase {self._running!r}; phases follow one another")
        if self._on_phase is not None:
            self._on_phase(name)
        self._running = name
        try:
            self._synchronize()
            start = time.perf_counter()
            with self._named_range(name):
                yield
                self._synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
        finally:
            self._running = None

    def collect(self) -> dict[str, float]:
        """`time/PHASE` of the phases that ran, and `time/elapsed`: seconds since the last `collect`. Starts afresh.

        Every second of a run is in exactly one `time/elapsed`.
        """
        now = time.perf_counter()
        seconds = {f"time/{name}": value for name, value in self._seconds.items()}
        seconds["time/elapsed"] = now - self._collected_at
        self._seconds = {}
        self._collected_at = now
        return seconds
