# SPDX-License-Identifier: Apache-2.0
"""Every second of a run is counted once, and after the device has done what it was asked.

Does not cover how exact the clock is.
"""

from __future__ import annotations

import time

import pytest

from omni_engine.training.logging import PhaseTimers

pytestmark = pytest.mark.fast


class _Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def test_phases_add_up_and_start_afresh_when_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    timers = PhaseTimers(lambda: None)
    for _ in range(2):
        with timers.phase("rollout"):
            clock.now += 3
    clock.now += 1
    assert timers.collect() == {"time/rollout": 6.0, "time/elapsed": 7.0}
    clock.now += 2
    assert timers.collect() == {"time/elapsed": 2.0}


def test_queued_device_work_counts_for_the_phase_that_queued_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    queued = [0.0]

    def synchronize() -> None:
        clock.now += queued[0]
        queued[0] = 0.0

    timers = PhaseTimers(synchronize)
    queued[0] = 100.0
    with timers.phase("update"):
        queued[0] = 5.0
    assert timers.collect()["time/update"] == 5.0


def test_phases_do_not_nest_and_are_known() -> None:
    timers = PhaseTimers(lambda: None)
    with pytest.raises(ValueError, match="inside"), timers.phase("rollout"), timers.phase("reward_wait"):
        pass
    with pytest.raises(ValueError, match="rolout"), timers.phase("rolout"):
        pass


def test_a_phase_that_failed_does_not_wait_for_the_device() -> None:
    calls: list[str] = []
    timers = PhaseTimers(lambda: calls.append("wait"))
    with pytest.raises(RuntimeError), timers.phase("update"):
        raise RuntimeError("device lost")
    assert calls == ["wait"]
    with timers.phase("save"):
        pass
