# SPDX-License-Identifier: Apache-2.0
"""Turn a checkpoint into a pipeline folder that `DiffusionPipeline.from_pretrained` loads.

    python -m tools.checkpoint.convert --checkpoint runs/NAME/checkpoints --model FOLDER --out FOLDER

One process on the host; one tensor of the transformer at a time is read, and 10 GiB of them held. The layout that the
run was trained with does not matter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import omni_engine  # noqa: F401 - prepares megatron.core's import
from omni_engine.checkpoint import CheckpointError, SavedWeights, check_export_target, write_pipeline


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where something is refused."""
    parser = argparse.ArgumentParser(prog="python -m tools.checkpoint.convert", description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of a run's checkpoints (its --save)")
    parser.add_argument("--iteration", type=int, help="iteration to convert; the newest if not given")
    parser.add_argument("--model", type=Path, required=True, help="pipeline folder that the run was started from")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args(arguments)
    try:
        iteration = convert(args.checkpoint, args.iteration, args.model, args.out)
    except CheckpointError as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: iteration {iteration} of {args.checkpoint}")
    return 0


def convert(root: Path, iteration: int | None, model: Path, out: Path) -> int:
    """Write the pipeline folder and return the iteration that it is of.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model, or the folder cannot be written.
    """
    check_export_target(model, out)
    weights = SavedWeights(root, iteration)
    weights.check_fits(model / "transformer")
    write_pipeline(iter(weights), model, out)
    return weights.iteration


if __name__ == "__main__":
    sys.exit(main())
