# SPDX-License-Identifier: Apache-2.0
"""Loss, log-probs, gradients and optimizer steps of every parallel layout against one process, on a tiny model.

    python -m tools.bench.parallel_parity [--json] [--layouts TP2 PP4 ...] [--cases none-none both-full ...]

Starts torchrun itself, once for each number of processes. A case is the guidance (none; both: two branches trained in
one pass; conditional: one of two is trained) and the recompute granularity; `lora` cases train adapters. All in
float32. The exit status is 1 if a bar is missed.

Errors are the worst found, and relative: of the loss of an update to the sum of the sizes of its decisions' shares
(they have both signs and nearly cancel, so the loss itself is no measure; loss_absolute is the plain difference, of a
mean of terms of size 1), of a decision's log-prob to itself, of a parameter's gradient or weight to its norm.
optimizer_error is that of the weights after four optimizer steps, displacement_error that of what the steps added to
them, in which the rounding of the weight counts a hundred to a thousand times. Where replicas differ in a bit, or the
updates saw other samples, the row has a `fault` and no errors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench.parity import WORKER, compare, plan_arguments, read_ranks
from tools.bench.parity_layouts import BLOCKS, LAYOUTS, PLAIN, TRAINING
from tools.bench.tiny_engine import make_folder

ROOT = Path(__file__).resolve().parents[2]
BARS = {
    "loss_error": 2e-6,
    "log_prob_error": 2e-6,
    "grad_error": 1e-5,
    "grad_norm_error": 1e-5,
    "optimizer_error": 1e-5,
}
LORA_LAYOUTS = ("TP2", "TP2-SP", "PP2", "U2", "R2", "DP2-DO", "TP2xPP2-SP")
"""Where the default run trains adapters too."""


def default_cases(layout: str) -> list[str]:
    """Every guidance with every recompute granularity, and adapters on some layouts."""
    return [*PLAIN, *(["lora", "lora-both-full"] if layout in LORA_LAYOUTS else [])]


def launch(folder: Path, processes: int, plan: Mapping[str, Sequence[str]], timeout: float) -> None:
    """Run the worker under torchrun.

    Raises:
        SystemExit: it failed or took too long; the message ends with what it wrote.
    """
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    command += ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(processes), "-m", WORKER]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    # Ranks share the cores; threads that wait for a busy one cost more than they give.
    environment |= {"OMP_NUM_THREADS": "1", "OMNI_PLATFORM": "cpu"}
    process = subprocess.Popen(
        [*command, str(folder), *plan_arguments(plan)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        _, told = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        _, told = process.communicate()
        told += f"\nnot finished after {timeout:g} s; see --timeout"
    except BaseException:
        process.terminate()
        raise
    if process.returncode:
        raise SystemExit(f"{processes} processes, {' '.join(plan)}: the run failed\n{told[-4000:]}")


def rows_of(folder: Path, plan: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Any]]:
    """A row a layout and case."""
    for layout, cases in plan.items():
        for case in cases:
            row: dict[str, Any] = {"layout": layout, "case": case}
            row |= {"guidance": TRAINING[case].guidance, "recompute": TRAINING[case].recompute}
            try:
                found = compare(read_ranks(folder / layout, case), read_ranks(folder / "ONE", case))
            except ValueError as fault:
                yield row | {"fault": str(fault), "passed": False}
                continue
            row |= {
                "loss_error": found.loss,
                "loss_absolute": found.loss_absolute,
                "log_prob_error": found.log_prob,
                "grad_error": found.grad,
                "grad_of": found.grad_of,
                "grad_norm_error": found.grad_norm,
                "optimizer_error": found.optimizer,
                "optimizer_of": found.optimizer_of,
                "displacement_error": found.displacement,
            }
            yield row | {"passed": all(row[key] <= bar for key, bar in BARS.items())}


def measure(layouts: Sequence[str], cases: Sequence[str] | None, timeout: float) -> Iterator[dict[str, Any]]:
    """Rows as the launches end; one process first."""
    wanted = {name: list(cases or default_cases(name)) for name in layouts if name != "ONE"}
    with tempfile.TemporaryDirectory() as name:
        folder = make_folder(Path(name), layers=BLOCKS)
        every = [case for case in TRAINING if any(case in of_layout for of_layout in wanted.values())]
        launch(folder, 1, {"ONE": every}, timeout)
        for processes in sorted({LAYOUTS[layout].processes for layout in wanted}):
            plan = {layout: of for layout, of in wanted.items() if LAYOUTS[layout].processes == processes}
            launch(folder, processes, plan, timeout)
            yield from rows_of(folder, plan)


def as_line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    figures = row.get("fault") or "".join(f"{row[key]:>13.1e}" for key in BARS)
    return f"{row['layout']:<24}{row['case']:<24}{figures}  {'pass' if row['passed'] else 'MISSED'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    known = [name for name in LAYOUTS if name != "ONE"]
    parser.add_argument("--layouts", nargs="+", choices=known, default=known, metavar="LAYOUT", help=", ".join(known))
    float32 = [name for name, case in TRAINING.items() if not case.bf16]
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=float32,
        metavar="CASE",
        help=f"{', '.join(float32)}; not given: every guidance and recompute, and lora on some layouts",
    )
    parser.add_argument("--timeout", type=float, default=3600, help="seconds of a launch")
    arguments = parser.parse_args()
    if not arguments.json:
        print(f"{'layout':<24}{'case':<24}" + "".join(f"{key.removesuffix('_error'):>13}" for key in BARS), flush=True)
        print(f"{'bar':<48}" + "".join(f"{bar:>13.0e}" for bar in BARS.values()), flush=True)
    missed = False
    for row in measure(arguments.layouts, arguments.cases, arguments.timeout):
        missed |= not row["passed"]
        print(json.dumps(row) if arguments.json else as_line(row), flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
