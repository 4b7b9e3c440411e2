# SPDX-License-Identifier: Apache-2.0
"""Run by test_splits.py under torchrun: one optimizer update on the same 16 samples, in micro-batches of several sizes.

    splits_worker.py FOLDER SIZE ...

FOLDER holds the model; the samples are made by the first launch, in one process. What a rank finds goes to
FOLDER/REPLICAS-SIZE.RANK.safetensors.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from omni_engine.parallel import ParallelGroups, destroy, initialize
from omni_engine.training.optimizer import StepResult
from tools.bench.parity_layouts import ALGORITHM, LAYOUTS, OPTIMIZER, ROLLOUT, Case
from tools.bench.parity_worker import setup_of, stored_samples
from tools.bench.tiny_engine import build_engine


def main(folder: Path, sizes: list[int]) -> None:
    groups = initialize(LAYOUTS["DP2"].parallel, seed=0)
    for size in sizes:
        gradients, metrics = update(folder, groups, size)
        file = folder / f"{groups.dp_size}-{size}.{groups.rank}.safetensors"
        save_file(gradients, file, metadata={"metrics": json.dumps(metrics)})


def update(folder: Path, groups: ParallelGroups, size: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The reduced gradients of one update and its metrics."""
    setup = replace(
        setup_of(LAYOUTS["DP2"], Case()),
        rollout=replace(ROLLOUT, prompts_per_step=8),
        algorithm=replace(ALGORITHM, updates_per_rollout=1),
        optimizer=replace(OPTIMIZER, micro_batch_size=size),
    )
    engine = build_engine(folder, groups, setup)
    samples = stored_samples(folder, engine)
    gradients: dict[str, torch.Tensor] = {}
    step = engine.optimizer.step

    def recording_step() -> StepResult:
        gradients.update(engine.gradients())
        return step()

    engine.optimizer.step = recording_step  # type: ignore[method-assign]
    return gradients, engine.updater.run(samples, replace(engine.scored(), local=samples.ids))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(size) for size in sys.argv[2:]])
    destroy()
