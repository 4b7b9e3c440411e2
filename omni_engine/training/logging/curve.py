# SPDX-License-Identifier: Apache-2.0
"""curve.png: the rewards over the iterations."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from omni_engine.training.logging.files import write_bytes
from omni_engine.training.logging.metrics_file import ITERATION, Record

HELD_OUT = "eval/reward"
"""Metric: mean reward, as it is trained on, over the held-out prompts."""
EVALUATION = "eval/"
"""Prefix of what an evaluation measures."""


def series(history: Sequence[Record], metric: str) -> tuple[list[int], list[float]]:
    """Iterations and values of a metric, in order; of an iteration that was measured twice, the later value."""
    values = {int(record[ITERATION]): record[metric] for record in history if metric in record}
    iterations = sorted(values)
    return iterations, [values[iteration] for iteration in iterations]


def evaluation_scorers(history: Sequence[Record]) -> list[str]:
    """Names of the scorers, beside the trained reward, that judged the held-out prompts, sorted."""
    metrics = {name for record in history for name in record if name.startswith(EVALUATION)}
    return sorted(name.removeprefix(EVALUATION) for name in metrics - {HELD_OUT})


def write_curve(path: Path, history: Sequence[Record], title: str) -> None:
    """Draw train reward (thin), held-out reward (thick) and further scorers (dashed). Raises `LoggingError`."""
    # Imported here: it takes a second, and of all processes only rank 0 draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # becomes the figure's canvas: Agg needs no screen
    axes = figure.add_subplot()
    axes.plot(*series(history, "reward/mean"), color="0.6", linewidth=1, label="train reward, each iteration")
    for number, name in enumerate(evaluation_scorers(history)):
        iterations, values = series(history, EVALUATION + name)
        axes.plot(iterations, values, "--o", color=f"C{1 + number}", markersize=3, label=f"held-out, scorer {name}")
    axes.plot(*series(history, HELD_OUT), "-o", color="C0", linewidth=3, markersize=6, label="held-out reward")
    axes.set(xlabel="iteration", ylabel="reward", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_bytes(path, content.getvalue())
