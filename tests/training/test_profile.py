# SPDX-License-Identifier: Apache-2.0
"""Invariant: `--profile` leaves a Chrome trace in which every phase, stage, micro-batch and block of the chosen
iterations has its name, each inside the one that it is a part of, and it leaves the numbers of the run alone; without
the flag a run makes no ranges and writes no trace.

Not covered: other devices' activities, pipelines of several ranks but for the names of their passes.
"""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni_engine.training.profile import Profiler, RangeTimers
from tests.runs import flags, metrics, succeeded

MEASURED = ("time/", "memory/", "throughput/", "wall_time")


def run(folder: Path, **changes: Any) -> Path:
    """Two iterations of the shipped tiny model in one process."""
    settings = {"train_iters": 2, "updates_per_rollout": 1, "kl_coef": 0.1, "save_interval": 0} | changes
    succeeded(flags(folder, settings))
    return folder / "run"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    traces = {"profile": True, "profile_step_start": 1, "profile_step_end": 2}
    return run(tmp_path_factory.mktemp("traced"), **traces)


def ranges(traced: Path) -> list[dict[str, Any]]:
    with gzip.open(traced / "profile" / "rank0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event.get("cat") == "user_annotation"]


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    end = outer["ts"] + outer["dur"] + 1  # microseconds, rounded
    return bool(outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= end)


def test_phases_stages_micro_batches_and_blocks_have_their_names(traced: Path) -> None:
    found = ranges(traced)
    names = {event["name"] for event in found}
    assert {"rollout", "reward_wait", "reference", "update", "weight_sync"} <= names
    (update,) = (event for event in found if event["name"] == "update")
    # 8 samples of one update in micro-batches of 2, at one step of the window; the model has 4 blocks.
    for number in range(4):
        for direction in ("forward", "backward"):
            name = f"stage 0 {direction}, micro-batch {number}"
            (one,) = (event for event in found if event["name"] == name and inside(event, update))
            blocks = [event["name"] for event in found if event["name"].startswith("block") and inside(event, one)]
            order = range(4) if direction == "forward" else range(3, -1, -1)
            assert blocks == [f"block {block} {direction}" for block in order]
    assert "block 0 forward" in {event["name"] for event in found if inside(event, update)}
    (rollout,) = (event for event in found if event["name"] == "rollout")
    assert any(event["name"] == "block 3 forward" and inside(event, rollout) for event in found)
    assert {"forward-backward", "all-grads-sync", "optimizer-inner-step"} <= names


def test_only_the_chosen_iterations_are_traced(traced: Path) -> None:
    assert sum(event["name"] == "rollout" for event in ranges(traced)) == 1


def test_a_trace_changes_no_number_and_no_trace_is_written_unasked(traced: Path, tmp_path: Path) -> None:
    plain = run(tmp_path)
    assert not (plain / "profile").exists()

    def numbers(record: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in record.items() if not key.startswith(MEASURED)}

    assert [numbers(record) for record in metrics(plain)] == [numbers(record) for record in metrics(traced)]


def test_a_rank_that_is_not_traced_makes_no_ranges() -> None:
    policy: Any = SimpleNamespace(groups=SimpleNamespace(rank=1))
    for profile in (True, False):
        settings: Any = SimpleNamespace(profile=profile, profile_ranks=(0,), profile_step_start=0, profile_step_end=1)
        profiler = Profiler(settings, Path("absent"), policy, None, print)  # type: ignore[arg-type]
        assert profiler.phase_range() is nullcontext
        with profiler.iteration(0):
            pass
        profiler.close()


def test_interleaved_passes_are_named_in_the_order_of_the_schedule() -> None:
    """Rank 1 of 2 with 2 chunks holds stages 1 and 3; two micro-batches at a time take each chunk in turn."""
    groups: Any = SimpleNamespace(pp_size=2, vpp_size=2, pp_rank=1)
    told: list[str] = []
    timers = RangeTimers(SimpleNamespace(groups=groups), lambda name: told.append(name) or nullcontext())  # type: ignore[arg-type, func-returns-value]
    timers("forward-backward", log_level=1).start(barrier=False)
    for direction in ["forward"] * 8 + ["backward"] * 4:
        timers(f"{direction}-compute", log_level=2).start()
        timers(f"{direction}-compute").stop()
    timers("forward-backward").stop()
    assert told[0] == "forward-backward"
    forward = [(1, 0), (1, 1), (3, 0), (3, 1), (1, 2), (1, 3), (3, 2), (3, 3)]
    backward = [(3, 0), (3, 1), (1, 0), (1, 1)]
    assert told[1:] == [f"stage {stage} forward, micro-batch {number}" for stage, number in forward] + [
        f"stage {stage} backward, micro-batch {number}" for stage, number in backward
    ]
