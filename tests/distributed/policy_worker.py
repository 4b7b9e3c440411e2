# SPDX-License-Identifier: Apache-2.0
"""Run under torchrun: velocities and gradients of a tiny model for given micro-batches, layout by layout.

    policy_worker.py FOLDER JOB ...

FOLDER holds the model, JOB is a name in policy_jobs.py. A rank's tensors go to FOLDER/JOB/run.RANK.safetensors, in the
form that tools/bench/parity.py reads.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file

from omni_engine.parallel import destroy, initialize, leave_layout
from tests.distributed.policy_jobs import JOBS, Job
from tools.bench.parity_worker import Tensors, named, reduced_gradients
from tools.bench.tiny_engine import Engine, Setup, build_engine


def main(folder: Path, names: list[str]) -> None:
    """Run the jobs, those of a layout one after the other."""
    for layout, of_layout in groupby(names, lambda name: JOBS[name].layout):
        groups = initialize(layout.parallel, seed=0)
        place = {"tp": groups.tp_rank, "cp": groups.cp_rank, "pp": groups.pp_rank, "dp": groups.dp_rank}
        for name in of_layout:
            engine = build_engine(folder, groups, Setup(parallel=layout.parallel))
            for attribute, value in JOBS[name].planted.items():
                assert hasattr(engine.policy.config, attribute)
                setattr(engine.policy.config, attribute, value)
            (folder / name).mkdir(exist_ok=True)
            save_file(
                run(engine, JOBS[name]),
                folder / name / f"run.{groups.rank}.safetensors",
                metadata={"figures": "{}", "place": json.dumps(place)},
            )
        leave_layout()
    destroy()


def run(engine: Engine, job: Job) -> Tensors:
    """On last stages the velocity [I, C] of each sample: `velocity/sample`, `few/sample` where only the first three
    micro-batches were run, `trained/sample` from the training pass. On all stages `masked/batch`, and the gradient of
    the sum over samples of velocity times cotangent."""
    inputs = [batch.inputs() for batch in job.batches]
    tensors: Tensors = {}
    for place, batch in enumerate(inputs):
        mask = engine.policy.chunks[0]._key_mask(batch, batch.time.device)  # type: ignore[operator]
        tensors[f"masked/{place}"] = torch.tensor(mask is not None)

    def keep(kind: str, place: int, velocities: torch.Tensor) -> None:
        for sample, velocity in zip(job.batches[place].samples, velocities, strict=True):
            tensors[f"{kind}/{sample.number}"] = velocity.detach().clone()

    def loss_of(place: int, output: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        keep("trained", place, output)
        return (output * job.batches[place].cotangent()).sum(), {}

    for kind, some in (("velocity", inputs), ("few", inputs[:3])):
        for place, output in enumerate(engine.policy.evaluate(some)):
            keep(kind, place, output)
    engine.optimizer.zero_grad()
    engine.policy.train(inputs, loss_of)
    return tensors | named("gradient", engine, reduced_gradients(engine))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
