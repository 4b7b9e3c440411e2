# SPDX-License-Identifier: Apache-2.0
"""Turn a checkpoint into a pipeline folder that `DiffusionPipeline.from_pretrained` loads.

    python -m tools.checkpoint.convert --checkpoint runs/NAME/checkpoints --model FOLDER --out FOLDER

Of a run with adapters (LoRA) the folder holds those alone, for `QwenImagePipeline.load_lora_weights`, or with --merge a
pipeline with the adapters added to its weights.

One process on the host; one tensor of the transformer at a time is read, and 10 GiB of them held. The layout that the
run was trained with does not matter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import omni_engine  # noqa: F401 - prepares megatron.core's import
from omni_engine.checkpoint import (
    CheckpointError,
    SafetensorsFolder,
    SavedWeights,
    check_export_target,
    merged,
    model_fingerprint,
    write_adapters,
    write_pipeline,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where something is refused."""
    parser = argparse.ArgumentParser(prog="python -m tools.checkpoint.convert", description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of a run's checkpoints (its --save)")
    parser.add_argument("--iteration", type=int, help="iteration to convert; the newest if not given")
    parser.add_argument("--model", type=Path, required=True, help="pipeline folder that the run was started from")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--weights", choices=("policy", "ema"), default="policy", help="trained, or averaged")
    parser.add_argument("--merge", action="store_true", help="add adapters to the weights of --model")
    args = parser.parse_args(arguments)
    try:
        weights = SavedWeights(args.checkpoint, args.iteration, average=args.weights == "ema")
        convert(weights, args.model, args.out, args.merge)
    except CheckpointError as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: iteration {weights.iteration} of {args.checkpoint}")
    return 0


def convert(weights: SavedWeights, model: Path, out: Path, merge: bool) -> None:
    """Write the folder.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model, or the folder cannot be written.
    """
    lora = weights.lora
    if merge and lora is None:
        raise CheckpointError("the checkpoint holds all weights and no adapters; leave --merge out")
    if merge and weights.base not in (None, model_fingerprint(model)):
        raise CheckpointError(f"the adapters were trained on another model than {model}; give the one of their run")
    check_export_target(model, out, adapters=lora is not None and not merge)
    weights.check_fits(model / "transformer")
    if lora is None:
        write_pipeline(iter(weights), model, out)
    elif merge:
        adapters = dict(weights)
        base = SafetensorsFolder(model / "transformer").whole(next(iter(adapters.values())).dtype)
        write_pipeline(merged(base, adapters, lora["alpha"] / lora["rank"]), model, out)
    else:
        write_adapters(iter(weights), lora["rank"], lora["alpha"], model, out)


if __name__ == "__main__":
    sys.exit(main())
