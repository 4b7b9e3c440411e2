# SPDX-License-Identifier: Apache-2.0
"""The summary says what the lines of metrics.jsonl say, and the closing message claims no more than was measured.

Does not cover whether a gain is larger than the noise of the held-out prompts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from omni_engine.training.logging import RunDirectory, RunSummary, closing_message, summarize
from omni_engine.training.logging.metrics_file import Record

pytestmark = pytest.mark.fast

HISTORY: list[Record] = [
    {"iteration": 0, "eval/reward": 0.25, "eval/strict": 0.5, "time/validate": 1.0, "time/elapsed": 1.0},
    {"iteration": 1, "parity/log_prob_gap_max": 0.0, "time/rollout": 2.0, "time/elapsed": 4.0},
    {"iteration": 2, "parity/log_prob_gap_max": 1e-6, "time/rollout": 2.0, "time/elapsed": 4.0},
    {"iteration": 2, "eval/reward": 0.75, "eval/strict": 0.25, "time/validate": 1.0, "time/elapsed": 1.0},
]


def _summary(history: list[Record]) -> RunSummary:
    return summarize(history, layout={"tp": 2, "dp": 1}, seed=3, images_per_iteration=8)


def test_the_summary_adds_up_the_lines() -> None:
    summary = _summary(HISTORY)
    assert (summary.held_out_reward_before, summary.held_out_reward_after) == (0.25, 0.75)
    assert (summary.evaluation_scorers["strict"].before, summary.evaluation_scorers["strict"].after) == (0.5, 0.25)
    assert (summary.iterations, summary.images, summary.images_per_second) == (2, 16, 2.0)
    assert (summary.seconds_total, summary.seconds_by_phase["rollout"]) == (10.0, 4.0)
    assert (summary.log_prob_gap_max, summary.first_ratio_max_deviation) == (1e-6, None)
    assert {"python", "torch", "megatron-core"} <= summary.versions.keys()


def test_times_that_came_too_late_for_a_line_count() -> None:
    late = {"time/save": 5.0, "time/elapsed": 6.0}
    summary = summarize(HISTORY, layout={}, seed=3, images_per_iteration=8, times_after=late)
    assert (summary.seconds_total, summary.seconds_by_phase["save"], summary.images_per_second) == (16.0, 5.0, 2.0)


def test_a_nan_gap_is_the_largest_gap() -> None:
    history = [*HISTORY, {"iteration": 3, "parity/log_prob_gap_max": math.nan}]
    assert math.isnan(_summary(history).log_prob_gap_max or 0.0)


def test_an_iteration_measured_twice_counts_as_measured_last() -> None:
    again = {"iteration": 2, "eval/reward": 0.5}
    assert _summary([*HISTORY, again]).held_out_reward_after == 0.5


def test_the_message_says_what_was_gained_and_where_to_look(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.curve.write_text("")
    message = closing_message(_summary(HISTORY), directory, [(tmp_path, "the trained pipeline")])
    assert "0.2500 before, 0.7500 after (+0.5000)" in message
    assert "strict: 0.5000 before, 0.2500 after (-0.2500)" in message
    assert str(directory.curve) in message and "the trained pipeline" in message
    assert str(directory.before) not in message, "a file that is not there is named"


def test_the_message_owns_up_to_a_reward_that_did_not_rise_or_was_not_measured(tmp_path: Path) -> None:
    summary = _summary(HISTORY)
    for after in (0.25, 0.1, math.nan):
        message = closing_message(replace(summary, held_out_reward_after=after), RunDirectory(tmp_path))
        assert "did not rise" in message
    assert "not known" in closing_message(_summary(HISTORY[:3]), RunDirectory(tmp_path))
    assert "not known" in closing_message(_summary([]), RunDirectory(tmp_path))
