# SPDX-License-Identifier: Apache-2.0
"""An iteration that takes the old log-probs from the rollout against one that computes them again, interleaved.

    python -m tools.bench.old_log_prob [--json] [--iterations 6] [--threads 2]

The native engine's log-probs are the trainer's bit for bit, so the pass that others need before an update can be left
out; the bench checks that both iterations see the same first ratio, exactly 1, and prints what the pass costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace

import omni_engine  # noqa: F401 - prepares megatron.core's import
from omni_engine.training.loop import train_iteration
from omni_engine.training.run import Run
from tools.bench.rl_loop import open_run, timed


def compare(run: Run, iterations: int) -> dict[str, object]:
    """Alternate iterations with and without the pass; the first pair is a warm-up."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    shares: list[float] = []
    deviations: list[float] = []

    def iteration(recompute: bool) -> None:
        run.updater.rules = replace(run.updater.rules, recompute_old_log_prob=recompute)
        deviations.append(train_iteration(run)["parity/first_ratio_max_deviation"])
        run.iteration += 1

    for _ in range(iterations + 1):
        for recompute in (False, True):
            run.timers.collect()
            seconds[recompute].append(timed(lambda recompute=recompute: iteration(recompute)))
            if recompute:
                shares.append(run.timers.collect()["time/old_log_prob"] / seconds[True][-1])
    pairs = zip(seconds[True][1:], seconds[False][1:], strict=True)
    return {
        "step_time_with_pass_over_without": round(statistics.median(long / short for long, short in pairs), 3),
        "pass_fraction_of_step": round(statistics.median(shares[1:]), 3),
        "first_ratio_max_deviation": max(deviations),
        "iterations": iterations,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--iterations", type=int, default=6, help="timed iterations of each kind")
    parser.add_argument("--threads", type=int, default=2, help="host threads of this process")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(arguments.threads, folder)
        try:
            row = compare(run, arguments.iterations)
        finally:
            run.close()
    print(json.dumps(row) if arguments.json else "\n".join(f"{key:34s} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
