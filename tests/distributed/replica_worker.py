# SPDX-License-Identifier: Apache-2.0
"""Run by test_replicas.py under torchrun in two processes: optimizer steps after which a rank's weights are wrong, and
steps with overlapped communication.

    replica_worker.py FOLDER

FOLDER holds the model. What a rank finds goes to FOLDER/found.RANK.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from omni_engine.arguments import ParallelSettings
from omni_engine.parallel import ParallelGroups, destroy, initialize, leave_layout
from omni_engine.training.optimizer import TrainingError
from omni_engine.training.replicas import ReplicaCheck, checksum
from tests.small_training import build_trainee
from tools.bench.tiny_engine import Engine, Setup, build_engine

PLAIN = ParallelSettings(check_param_sync_interval=1)
TENSOR = replace(PLAIN, tensor_model_parallel_size=2)
OVERLAPPED = replace(
    PLAIN, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=1
)
EVERY_THIRD = replace(PLAIN, check_param_sync_interval=3)
UNCHECKED = replace(OVERLAPPED, check_param_sync=False)

Plant = tuple[str, Callable[[torch.Tensor], None]]


def flip_a_bit(weight: torch.Tensor) -> None:
    """The lowest bit of an element in the middle third of the rows: of the keys, in a fused weight."""
    weight.view(torch.int32)[weight.shape[0] // 2].view(-1)[0] ^= 1


def exchange(weight: torch.Tensor) -> None:
    weight[:2] = weight[:2].flip(0)


QKV, BIAS, OUT_BIAS = "blocks.0.image.qkv.weight", "blocks.1.image.mlp_in.bias", "blocks.1.image.out.bias"
CASES: dict[str, tuple[ParallelSettings, Plant | None]] = {
    "sound": (PLAIN, None),
    "sound tp": (TENSOR, None),
    "sound overlap": (OVERLAPPED, None),
    "bit": (PLAIN, (QKV, flip_a_bit)),
    "exchange": (PLAIN, (BIAS, exchange)),
    "bit tp": (TENSOR, (OUT_BIAS, flip_a_bit)),
    "sharded bit tp": (TENSOR, (QKV, flip_a_bit)),
    "bit overlap": (OVERLAPPED, (QKV, flip_a_bit)),
    "every third step": (EVERY_THIRD, (QKV, flip_a_bit)),
}


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    for name, (parallel, plant) in CASES.items():
        groups = initialize(parallel, seed=0)
        found[name] = train(folder, groups, parallel, plant)
        leave_layout()
    groups = initialize(UNCHECKED, seed=0)
    found |= overlap(folder, groups)
    (folder / f"found.{groups.rank}.json").write_text(json.dumps(found))


def train(folder: Path, groups: ParallelGroups, parallel: ParallelSettings, plant: Plant | None) -> str | None:
    """What stops three steps, where the weights of rank 1 are spoilt whenever all of them are in place."""
    trainee = build_trainee(folder, groups, parallel)
    finish = trainee.optimizer.finish_param_sync

    @torch.no_grad()
    def finish_and_spoil() -> None:
        finish()
        begins = 2 if parallel == EVERY_THIRD else 1  # the first step is checked always
        if plant is not None and groups.rank == 1 and trainee.policy.version >= begins:
            path, spoil = plant
            spoil(trainee.policy.parameters()[path])

    trainee.optimizer.finish_param_sync = finish_and_spoil  # type: ignore[method-assign]
    try:
        trainee.train(0, 1, 2)
    except TrainingError as error:
        return str(error)
    return None


def overlap(folder: Path, groups: ParallelGroups) -> dict[str, Any]:
    """What a rank holds right after a step, and what passes that only run forward see and leave behind."""
    setup = Setup(parallel=UNCHECKED)
    engines = [build_engine(folder, groups, setup) for _ in range(2)]
    for engine in engines:
        engine.updater.run(engine.sample(), engine.scored())
    check = ReplicaCheck(engines[0].policy)
    stale = check.difference() is not None
    engines[0].optimizer.finish_param_sync()
    alike = check.difference() is None
    samples = [sampled(engine) for engine in engines]
    alike_again = ReplicaCheck(engines[1].policy).difference() is None
    reduces = all(group.is_last_microbatch for chunk in engines[1].optimizer.ddp for group in chunk.bucket_groups)
    for engine in engines:
        engine.updater.run(engine.sample(1), engine.scored(1))
        engine.optimizer.finish_param_sync()
    weights = [[checksum(weight).item() for weight in engine.policy.parameters().values()] for engine in engines]
    return {
        "stale after a step": stale,
        "alike after finish": alike,
        "alike after a forward pass": alike_again,
        "sampled alike": samples[0] == samples[1],
        "trained alike": weights[0] == weights[1],
        "a forward pass leaves reduction on": reduces,
    }


def sampled(engine: Engine) -> list[int]:
    """Checksums of the next samples."""
    segment = engine.sample(1).segments["image"]
    return [checksum(tensor).item() for tensor in (segment.x_t, segment.x_next)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    destroy()
