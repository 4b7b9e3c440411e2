# SPDX-License-Identifier: Apache-2.0
"""Run by test_checkpoint_reshard.py under torchrun in two processes: saves under some layouts, loads under others.

    checkpoint_worker.py FOLDER

FOLDER holds the model. What a rank holds goes to FOLDER/dumps/NAME.RANK.safetensors under `kind/shard dim/HF name`, for
the test to put together: this file gathers nothing, so a fault of the engine's own gathering cannot hide here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from omni_engine.arguments import LoraSettings, ParallelSettings
from omni_engine.checkpoint import CheckpointError, export_policy, latest_iteration, load_checkpoint, save_checkpoint
from omni_engine.parallel import ParallelGroups, destroy, initialize, leave_layout
from tests.full_disk import full_disk
from tests.small_training import Trainee, build_trainee


def layout(tp: int = 1, pp: int = 1, **others: Any) -> ParallelSettings:
    return ParallelSettings(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **others)


LAYOUTS = {
    "TP2": layout(tp=2),
    "PP2": layout(pp=2),
    "DP2": layout(),
    "DP2-DO": layout(use_distributed_optimizer=True),
}
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"bf16": True},
    "adapters": {"lora": LoraSettings(lora_rank=2), "ema_decay": 0.9},
}
WRITERS = {"float32": ("TP2", "PP2", "DP2", "DP2-DO"), "bf16": ("TP2", "DP2-DO"), "adapters": ("TP2", "DP2-DO")}
READERS = {"float32": ("TP2", "PP2", "DP2-DO"), "bf16": ("PP2", "DP2-DO"), "adapters": ("TP2", "PP2")}
"""Layouts that every writer's checkpoint is loaded under."""


def main(folder: Path) -> None:
    (folder / "dumps").mkdir(exist_ok=True)
    for form, readers in READERS.items():
        for writer in WRITERS[form]:
            with_layout(writer, lambda groups: write(folder, groups, writer, form))  # noqa: B023 - called at once
        for reader in readers:
            with_layout(reader, lambda groups: read(folder, groups, reader, form))  # noqa: B023 - called at once
    with_layout("TP2", lambda groups: fail(folder, groups))


def with_layout(name: str, work: Callable[[ParallelGroups], None]) -> None:
    groups = initialize(LAYOUTS[name], seed=0)
    work(groups)
    leave_layout()


def build(folder: Path, groups: ParallelGroups, name: str, form: str) -> Trainee:
    return build_trainee(folder / "model", groups, LAYOUTS[name], **FORMS[form])


def write(folder: Path, groups: ParallelGroups, name: str, form: str) -> None:
    """Two steps, save, two more; then the same from the checkpoint, which must give the same bits."""
    trainee = build(folder, groups, name, form)
    trainee.train(0, 1)
    root = folder / f"{form}-{name}"
    save_checkpoint(root, 2, trainee.policy, trainee.optimizer, {"writer": name})
    dump(folder, trainee, f"{form}-{name}-saved")
    saved = everything(trainee)
    export_once(folder, trainee, f"{form}-{name}")
    trainee.train(2, 3)
    dump(folder, trainee, f"{form}-{name}-after")

    resumed = build(folder, groups, name, form)
    state = load_checkpoint(root, resumed.policy, resumed.optimizer)
    assert (state.iteration, state.state, resumed.policy.version) == (2, {"writer": name}, 2)
    assert_same_bits(everything(resumed), saved, f"{form} {name} right after loading")
    resumed.train(2, 3)
    assert_same_bits(everything(resumed), everything(trainee), f"{form} {name} two steps after loading")


def export_once(folder: Path, trainee: Trainee, name: str) -> None:
    """By the ranks of the first replica, as a run does."""
    policy = trainee.policy
    if policy.groups.dp_rank == 0:
        export_policy(policy, folder / "model", folder / "exports" / name)
        if policy.lora is not None:
            export_policy(policy, folder / "model", folder / "exports" / f"{name}-merged", merge=True)


def read(folder: Path, groups: ParallelGroups, name: str, form: str) -> None:
    """Load every writer's checkpoint, then two steps."""
    for writer in WRITERS[form]:
        trainee = build(folder, groups, name, form)
        for parameter in trainee.policy.own_parameters().values():
            parameter.data.fill_(7.0)
        load_checkpoint(folder / f"{form}-{writer}", trainee.policy, trainee.optimizer)
        dump(folder, trainee, f"{form}-{writer}-{name}-loaded")
        trainee.train(2, 3)
        dump(folder, trainee, f"{form}-{writer}-{name}-after")


def fail(folder: Path, groups: ParallelGroups) -> None:
    """A disk that is full for one rank stops both, and the checkpoint before is still there to load."""
    trainee = build(folder, groups, "TP2", "float32")
    root = folder / "full"
    save_checkpoint(root, 1, trainee.policy, trainee.optimizer, {})
    before = sorted((path.name, path.stat().st_mtime_ns) for path in root.rglob("*"))
    for full_rank in (0, 1):
        try:
            with full_disk(10_000) if groups.rank == full_rank else nullcontext():
                save_checkpoint(root, 2, trainee.policy, trainee.optimizer, {})
            raise AssertionError(f"rank {groups.rank} saved though the disk of rank {full_rank} was full")
        except CheckpointError as error:
            assert f"(rank {full_rank})" in str(error), error
        dist.barrier()
        assert sorted((path.name, path.stat().st_mtime_ns) for path in root.rglob("*")) == before
        assert latest_iteration(root) == 1
        dist.barrier()
    # A file that one rank cannot verify stops both too.
    if groups.rank == 0:
        damaged = root / "iter_0000001" / "__1_0.distcp"
        damaged.write_bytes(damaged.read_bytes()[:-1])
    dist.barrier()
    try:
        load_checkpoint(root, trainee.policy, trainee.optimizer)
        raise AssertionError("a truncated checkpoint was loaded")
    except CheckpointError as error:
        assert "__1_0.distcp has" in str(error), error


def everything(trainee: Trainee) -> dict[str, torch.Tensor]:
    """A copy of all tensors of this rank that the optimizer or the model keeps, whatever their form."""
    tensors = {f"weight/{name}": weight for name, weight in trainee.weights().items()}
    tensors |= {f"average/{name}": value.clone() for name, value in averages(trainee).items()}
    for inner in trainee.optimizer.optimizer.chained_optimizers:
        parameters = [parameter for group in inner.optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            tensors[f"main/{index}"] = parameter.detach().clone()
            for key, value in inner.optimizer.state[parameter].items():
                tensors[f"{key}/{index}"] = value.detach().clone()
    return tensors


def averages(trainee: Trainee) -> dict[str, torch.Tensor]:
    average = trainee.optimizer.average
    return {} if average is None else average.weights


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], when: str) -> None:
    assert set(found) == set(expected), when
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different, f"{when}: {different}"


def dump(folder: Path, trainee: Trainee, name: str) -> None:
    """This rank's weights, and its moments where each parameter has its own (not of the distributed optimizer)."""
    mapping = trainee.policy.mapping
    local = {"weight": trainee.weights(), "average": averages(trainee)}
    (inner,) = trainee.optimizer.optimizer.chained_optimizers
    if not hasattr(inner, "gbuf_ranges"):
        masters = {
            name: getattr(parameter, "main_param", parameter)
            for name, parameter in trainee.policy.trained_parameters().items()
        }
        for key in ("exp_avg", "exp_avg_sq"):
            local[key] = {name: inner.optimizer.state[master][key] for name, master in masters.items()}
        local["main"] = masters
    tensors = {}
    for kind, parameters in local.items():
        for path, parameter in parameters.items():
            entry = mapping.entries[path]
            for source, piece in zip(entry.sources, entry.split(parameter.detach()), strict=True):
                tensors[f"{kind}/{entry.shard_dim}/{source}"] = piece.clone().contiguous()
    save_file(tensors, folder / "dumps" / f"{name}.{trainee.policy.groups.rank}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    destroy()
