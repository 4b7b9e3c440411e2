# SPDX-License-Identifier: Apache-2.0
"""Settings of what a run writes for people."""

from __future__ import annotations

from dataclasses import dataclass

from omni_engine.arguments.flag import flag


@dataclass(frozen=True)
class LoggingSettings:
    """Logging: where a run writes and what it shows."""

    run_name: str = flag("flowgrpo", help="Name of the run: its folder is RUNS_DIR/RUN_NAME.")
    runs_dir: str = flag("runs", help="Folder that holds the folders of the runs.")
    log_interval: int = flag(
        1, unit="iterations", at_least=1, source="Megatron", help="Metrics are written every so many iterations."
    )
    tensorboard: bool = flag(True, help="Write TensorBoard event files into the folder of the run.")
    wandb_project: str | None = flag(
        None, source="Megatron", help="Weights & Biases project to report to. Not given: nothing is sent."
    )
    progress_bar: str = flag(
        "auto", choices=("auto", "always", "never"), help="Progress bar of an iteration. auto: on a terminal only."
    )
    peak_tflops: float = flag(
        0.0,
        unit="1e12 FLOP/s",
        at_least=0,
        help="Peak rate of a device that throughput/mfu is a fraction of. 0: from a table of devices, measured on a "
        "CPU; for a device that is not in the table there is no throughput/mfu.",
    )
    profile: bool = flag(
        False,
        source="Megatron",
        help="Write a torch profiler trace of some iterations to profile/ in the folder of the run, with a named range "
        "for each phase, stage, micro-batch and block.",
    )
    profile_step_start: int = flag(
        10, unit="iterations", at_least=0, source="Megatron", help="First iteration in the trace, counted from 0."
    )
    profile_step_end: int = flag(
        12, unit="iterations", at_least=1, source="Megatron", help="First iteration after the trace."
    )
    profile_ranks: tuple[int, ...] = flag(
        (0,), nargs="+", at_least=0, source="Megatron", help="Global ranks that write a trace."
    )
