# SPDX-License-Identifier: Apache-2.0
"""A log line has Megatron's form, so that what reads Megatron's logs reads ours.

Does not cover which metrics a training step measures.
"""

from __future__ import annotations

import math
from datetime import datetime

import pytest

from omni_engine.training.logging.log_line import evaluation_line, iteration_line

pytestmark = pytest.mark.fast

NOW = datetime(2026, 1, 2, 3, 4, 5)


def test_the_form_is_that_of_megatron() -> None:
    record = {
        "iteration": 3,
        "progress/consumed_samples": 576.0,
        "time/elapsed": 1.5,
        "optimizer/learning_rate": 1e-4,
        "reward/mean": 0.5,
    }
    assert iteration_line([record], 100, NOW) == (
        " [2026-01-02 03:04:05] iteration        3/     100 | consumed samples:          576 |"
        " elapsed time per iteration (ms): 1500.0 | learning rate: 1.000000E-04 | reward: 0.5000 |"
    )


def test_a_line_covers_all_iterations_since_the_last() -> None:
    first = {"iteration": 1, "reward/mean": 0.25, "parity/log_prob_gap_max": 1.0, "rollout/failed_samples": 1.0}
    second = {"iteration": 2, "reward/mean": 0.75, "parity/log_prob_gap_max": 0.0, "rollout/failed_samples": 2.0}
    line = iteration_line([first, second], 2, NOW)
    assert "reward: 0.5000" in line and "log-prob gap max: 1.000E+00" in line and "failed samples:   3" in line


def test_a_nan_gap_is_not_hidden_by_a_later_number() -> None:
    gaps = [0.0, math.nan, 1.0]
    records = [{"iteration": n, "parity/log_prob_gap_max": gap} for n, gap in enumerate(gaps)]
    assert "log-prob gap max: NAN" in iteration_line(records, 3, NOW)


def test_an_evaluation_names_its_scorers() -> None:
    line = evaluation_line(40, {"reward": 0.5, "strict": 0.25}, NOW)
    assert line.endswith("validation at iteration       40 | held-out reward: 0.5000 | held-out strict: 0.2500 |")
