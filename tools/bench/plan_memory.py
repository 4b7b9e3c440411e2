# SPDX-License-Identifier: Apache-2.0
"""The planner's memory against what training steps take: four layouts of full-width Qwen-Image blocks on the CPU.

    python -m tools.bench.plan_memory [--json] [--layout one TP2 PP2 DP2 ...]

A rank builds the policy, steps the optimizer once so that its state exists, and then runs an iteration: rollout and
update. Its resident memory at the peak of that iteration, less what it was before the policy was built, is compared
with the plan. Weights are float32, 24 heads of 128, one block (two for PP2): 5.4 GB a block with Adam. At most 13 GB
are used at a time; a layout takes some minutes on two free cores.

The ranks are told to hand every block of a megabyte or more back to the system when it is freed
(MALLOC_MMAP_THRESHOLD_): glibc would otherwise keep freed blocks of up to 32 MB, which are no need of the training's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "models" / "qwen_image"
BLOCKS = {"one": 1, "TP2": 1, "PP2": 2, "DP2": 1}
"""Layouts and their blocks. DP2 has the distributed optimizer."""
PARTS = ("weights", "gradients", "optimizer", "activations", "optimizer_step", "samples")


def measure(layout: str, recompute: str) -> list[dict[str, Any]]:
    """A row a rank.

    Raises:
        RuntimeError: a rank failed; the message ends with what it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = shutil.copytree(MODEL, Path(folder) / "model")
        config = model / "transformer" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": BLOCKS[layout]}))
        processes = 1 if layout == "one" else 2
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes), "-m", "tools.bench.plan_memory_worker"]
        result = subprocess.run(
            [*command, str(model), layout, recompute, folder],
            cwd=ROOT,
            env=os.environ
            | {
                "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
                "MALLOC_MMAP_THRESHOLD_": str(2**20),
                "OMNI_PLATFORM": "cpu",
            },
            capture_output=True,
            text=True,
        )
        if result.returncode:
            raise RuntimeError(f"{layout}: the ranks failed\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(processes)]


def show(row: dict[str, Any]) -> str:
    parts = "".join(f"{row['planned'][name] / 1e9:10.3f}" for name in PARTS)
    measured, planned = row["measured_bytes"] / 1e9, row["planned_bytes"] / 1e9
    head = f"{row['layout']:8s}{row['recompute']:10s}{row['rank']:5d}"
    return f"{head}{measured:10.3f}{planned:10.3f}{row['planned_over_measured'] - 1:9.1%}{parts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object a rank")
    parser.add_argument("--layout", nargs="+", choices=tuple(BLOCKS), default=list(BLOCKS))
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    arguments = parser.parse_args()
    if not arguments.json:
        heads = "".join(f"{name.split('_')[-1]:>10s}" for name in PARTS)
        print(
            f"GB of a rank\n{'layout':8s}{'recompute':10s}{'rank':>5s}{'measured':>10s}{'planned':>10s}    error{heads}"
        )
    for layout in arguments.layout:
        for row in measure(layout, arguments.recompute):
            print(json.dumps(row) if arguments.json else show(row), flush=True)


if __name__ == "__main__":
    main()
