# SPDX-License-Identifier: Apache-2.0
"""The line of text of an iteration, in the form Megatron-LM prints, so that the same eyes and scripts can read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from omni_engine.training.logging.metrics_file import ITERATION, Record


@dataclass(frozen=True)
class _Column:
    label: str
    metric: str
    format: str
    over_iterations: Literal["last", "mean", "max", "sum"] = "mean"
    scale: float = 1.0


_COLUMNS = (
    _Column("consumed samples", "progress/consumed_samples", "{:12.0f}", "last"),
    _Column("elapsed time per iteration (ms)", "time/elapsed", "{:.1f}", scale=1000.0),
    _Column("learning rate", "optimizer/learning_rate", "{:.6E}", "last"),
    _Column("reward", "reward/mean", "{:.4f}"),
    _Column("reward std within group", "reward/std_within_group", "{:.4f}"),
    _Column("zero-std groups", "reward/zero_std_ratio", "{:.3f}"),
    _Column("loss", "policy/loss", "{:.6E}"),
    _Column("kl", "policy/kl", "{:.6E}"),
    _Column("clip fraction low", "policy/clip_fraction_low", "{:.3f}"),
    _Column("clip fraction high", "policy/clip_fraction_high", "{:.3f}"),
    _Column("log-prob gap max", "parity/log_prob_gap_max", "{:.3E}", "max"),
    _Column("grad norm", "optimizer/grad_norm", "{:.3f}", "last"),
    _Column("images/s/device", "throughput/images_per_second_per_device", "{:.2f}"),
    _Column("TFLOP/s/device", "throughput/tflops_per_device", "{:.3g}"),
    _Column("MFU", "throughput/mfu", "{:.3f}"),
    _Column("failed samples", "rollout/failed_samples", "{:3.0f}", "sum"),
    _Column("masked samples", "rollout/masked_samples", "{:3.0f}", "sum"),
)


def iteration_line(records: Sequence[Record], total_iterations: int, now: datetime | None = None) -> str:
    """Line for the iterations since the last line (at least one). Metrics that were not measured are left out.

    As in Megatron-LM, rates and rewards are means over those iterations; counts and gaps are sums and maxima.
    """
    cells = [f"iteration {records[-1][ITERATION]:8d}/{total_iterations:8d}"]
    for column in _COLUMNS:
        values = [record[column.metric] for record in records if column.metric in record]
        if values:
            cells.append(f"{column.label}: {column.format.format(_reduce(column, values) * column.scale)}")
    return _line(cells, now)


def evaluation_line(iteration: int, rewards: dict[str, float], now: datetime | None = None) -> str:
    """Line of an evaluation. `rewards`: name to mean over the held-out prompts."""
    cells = [f"validation at iteration {iteration:8d}"]
    cells += [f"held-out {name}: {value:.4f}" for name, value in rewards.items()]
    return _line(cells, now)


def _line(cells: list[str], now: datetime | None) -> str:
    return f" [{now or datetime.now():%Y-%m-%d %H:%M:%S}] " + " | ".join(cells) + " |"


def _reduce(column: _Column, values: list[float]) -> float:
    if column.over_iterations == "last":
        return values[-1]
    if column.over_iterations == "max":
        # Python's max() hides a NaN that is not the first value.
        return next((value for value in values if value != value), max(values))
    total = sum(values)
    return total / len(values) if column.over_iterations == "mean" else total
