# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: log lines, metrics, dashboards, pictures, a curve and a summary, in `runs/NAME/`.

Its face: `open_run_directory`, `RunLogger`, `PhaseTimers`, `summarize` and `closing_message`. Only rank 0 writes.
"""

from omni_engine.training.logging.files import LoggingError
from omni_engine.training.logging.run_directory import RunDirectory, open_run_directory
from omni_engine.training.logging.run_logger import RunLogger
from omni_engine.training.logging.summary import RunSummary, closing_message, summarize
from omni_engine.training.logging.timers import PHASES, PhaseTimers

__all__ = [
    "PHASES",
    "LoggingError",
    "PhaseTimers",
    "RunDirectory",
    "RunLogger",
    "RunSummary",
    "closing_message",
    "open_run_directory",
    "summarize",
]
