# SPDX-License-Identifier: Apache-2.0
"""Save and resume a run: trained weights and their average, optimizer, learning-rate schedule, weight version,
generators, and the caller's state.

A checkpoint is a folder in Megatron's `torch_dist` format with two files of ours beside the tensors: `state.json` (what
is not a tensor, and a checksum of every other file) and `rng.json`. See `folder` for where it lies, `sharded` for what
the tensors are called and `storage` for how they are written and why reading them is safe.

Of a run with adapters only those are saved: the frozen weights are those of --model. Hyperparameters are never taken
from a checkpoint: a resumed run has those of its own flags. Of the optimizer it takes the moments, the float32 weights
and the step counts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import merge

from omni_engine.checkpoint import folder as disk
from omni_engine.checkpoint.errors import CheckpointError, on_all_ranks, some
from omni_engine.checkpoint.record import FORMAT, STATE_FILE, LoadedState, SavedRun
from omni_engine.checkpoint.rng import generator_states, set_generator_states
from omni_engine.checkpoint.sharded import (
    AVERAGE_PREFIX,
    adam_step,
    built_tensors,
    is_weight_key,
    model_state,
    optimizer_state,
    set_adam_step,
)
from omni_engine.checkpoint.storage import METADATA_FILE, CheckedReader, megatron_files, read_tensors, write_tensors
from omni_engine.models.policy import Policy
from omni_engine.parallel import ParallelGroups

RNG_FILE = "rng.json"


class Average(Protocol):
    """A moving average of trained weights, float32, by their paths."""

    weights: dict[str, torch.Tensor]


class Trained(Protocol):
    """What is saved of the trainer's optimizer: Megatron's optimizer, its learning-rate schedule, and the average."""

    optimizer: Any
    scheduler: Any

    @property
    def average(self) -> Average | None: ...


def save_checkpoint(
    root: str | Path, iteration: int, policy: Policy, optimizer: Trained, state: Mapping[str, Any]
) -> None:
    """Write the checkpoint of a finished iteration. A collective; on return it is on the disk and the tracker names it.

    Args:
        root: on storage that all nodes share.
        state: what JSON holds, equal on every rank.

    Raises:
        CheckpointError: on every rank, if one of them could not write. Earlier checkpoints are as they were.
    """
    root, groups = Path(root), policy.groups
    partial = disk.partial_folder(root, iteration)
    trouble = (
        f"the checkpoint of iteration {iteration} cannot be written to {root} (free space there or choose another "
        "--save; earlier checkpoints are untouched)"
    )
    tensors, _ = _state(policy, optimizer, is_loading=False)
    record = {
        "format": FORMAT,
        "iteration": iteration,
        "weight_version": policy.version,
        "adam_step": adam_step(optimizer.optimizer),
        "scheduler_steps": optimizer.scheduler.num_steps,
        "layout": groups.describe(),
        "lora": _identity(policy),
        "state": dict(state),
    }
    try:
        with on_all_ranks(trouble):
            json.dumps(record)
            if groups.rank == 0:
                disk.prepare(root, iteration)
        with on_all_ranks(trouble):
            write_tensors(partial, tensors, groups)
            own = {file.name: disk.checksum(file) for file in partial.glob(f"__{groups.rank}_*.distcp")}
        files = {name: sum_ for part in _gather(own) for name, sum_ in part.items()}
        generators = _gather((_model_rank(groups), generator_states()) if groups.dp_cp_rank == 0 else None)
        with on_all_ranks(trouble):
            if groups.rank == 0:
                rng = {"model_ranks": _model_ranks(groups), "states": dict(filter(None, generators))}
                _write_small_files(partial, record, files, rng)
                disk.publish(root, iteration)
    except CheckpointError:
        if groups.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _state(policy: Policy, optimizer: Trained, is_loading: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sharded tensors of a run, and the rest of the optimizer's state dict."""
    model = model_state(policy.own_parameters(), policy.mapping, policy.groups)
    moments, rest = optimizer_state(optimizer.optimizer, model, is_loading)
    state = {"model": model, "optimizer": moments}
    if optimizer.average is not None:
        state["average"] = model_state(optimizer.average.weights, policy.mapping, policy.groups, AVERAGE_PREFIX)
    return state, rest


def _identity(policy: Policy) -> dict[str, Any] | None:
    return None if policy.lora is None else policy.lora.identity()


def _gather(value: Any) -> list[Any]:
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _model_rank(groups: ParallelGroups) -> str:
    return f"tp{groups.tp_rank} pp{groups.pp_rank}"


def _model_ranks(groups: ParallelGroups) -> str:
    return f"TP{groups.tp_size} x PP{groups.pp_size}"


def _write_small_files(folder: Path, record: dict[str, Any], files: dict[str, list[int]], rng: dict[str, Any]) -> None:
    for name, content in (megatron_files() | {RNG_FILE: json.dumps(rng).encode()}).items():
        disk.write_durably(folder / name, content)
        files[name] = disk.checksum(folder / name)
    files[METADATA_FILE] = disk.checksum(folder / METADATA_FILE)
    disk.write_durably(folder / STATE_FILE, json.dumps(record | {"files": files}, indent=2).encode())


def load_checkpoint(root: str | Path, policy: Policy, optimizer: Trained, iteration: int | None = None) -> LoadedState:
    """Fill policy, optimizer and learning-rate schedule from a checkpoint, the newest by default. A collective.

    The layout may be another than that of the run that wrote it. Generators are set where tp and pp are the same.

    Raises:
        CheckpointError: on every rank: there is no such checkpoint, it is damaged, or it is of another model.
    """
    groups = policy.groups
    trouble = f"{root} cannot be resumed from"
    with on_all_ranks(trouble):
        saved = SavedRun(Path(root), iteration)
        _check_adapters(saved, policy)
    with on_all_ranks(trouble):
        # Every file is read once, by one of the ranks.
        disk.verify_files(saved.folder, dict(sorted(saved.files.items())[groups.rank :: groups.world_size]))
    wanted, rest = _state(policy, optimizer, is_loading=True)
    names = set().union(*_gather({tensor.key for tensor in built_tensors(wanted["model"])}))
    with on_all_ranks(trouble):
        reader = CheckedReader(saved.folder)
        _check_fits(reader, wanted, names)
        rng = disk.read_json(saved.folder / RNG_FILE)
    with on_all_ranks(trouble):
        tensors = read_tensors(reader, wanted)
    with on_all_ranks(trouble):
        _apply(tensors, rest, saved, policy, optimizer)
        if rng["model_ranks"] == _model_ranks(groups):
            set_generator_states(rng["states"][_model_rank(groups)])
    return saved.loaded


@torch.no_grad()
def _apply(tensors: dict[str, Any], rest: dict[str, Any], saved: SavedRun, policy: Policy, optimizer: Trained) -> None:
    for path, parameter in policy.own_parameters().items():
        parameter.copy_(tensors["model"][path])
    if optimizer.average is not None:
        for path, average in optimizer.average.weights.items():
            average.copy_(tensors["average"][path])
    optimizer.optimizer.load_state_dict(merge(rest, tensors["optimizer"]))
    set_adam_step(optimizer.optimizer, saved.adam_step)
    optimizer.scheduler.num_steps = saved.scheduler_steps
    optimizer.scheduler.step(0)  # sets the learning rate
    policy.version = saved.weight_version


def _check_adapters(saved: SavedRun, policy: Policy) -> None:
    """Refuse adapters of another form, and adapters where all weights are trained or the other way round.

    Raises:
        CheckpointError: the checkpoint holds other adapters.
    """
    held, wanted = saved.lora, json.loads(json.dumps(_identity(policy)))
    if held != wanted:
        told = [
            "all weights"
            if lora is None
            else f"adapters of rank {lora['rank']} and alpha {lora['alpha']:g} on {' '.join(lora['target_modules'])}"
            for lora in (held, wanted)
        ]
        raise CheckpointError(
            f"{saved.folder} holds {told[0]}, and this run trains {told[1]}: set --lora-rank, --lora-alpha and "
            "--lora-target-modules as that run did"
        )


def _check_fits(reader: CheckedReader, wanted: dict[str, Any], names: set[str]) -> None:
    """Compare names, shapes and dtypes of what this rank wants, and all names of the weights.

    Raises:
        CheckpointError: the checkpoint is of another model or precision.
    """
    held = reader.tensors
    weights = {key for key in held if is_weight_key(key)}
    faults = []
    if weights != names:
        faults.append(f"it lacks {some(names - weights)} and holds {some(weights - names)} besides")
    shapes, dtypes, absent = [], [], []
    for tensor in built_tensors(wanted):
        if tensor.key not in held:
            absent.append(tensor.key)
        elif tuple(held[tensor.key].size) != tuple(tensor.global_shape):
            shapes.append(f"{tensor.key} {tuple(held[tensor.key].size)} instead of {tuple(tensor.global_shape)}")
        elif held[tensor.key].properties.dtype != tensor.dtype:
            dtypes.append(f"{tensor.key} is {held[tensor.key].properties.dtype} instead of {tensor.dtype}")
    if shapes:
        faults.append(f"shapes differ: {some(shapes)}")
    if faults:
        raise CheckpointError(
            f"{reader.path} is of another model than --model: {'; '.join(faults)}. Give the --model that the run was "
            "started from"
        )
    if dtypes:
        raise CheckpointError(f"{reader.path} is of another precision: {some(dtypes)}. Set --bf16 as that run did")
    if "average" in wanted and not any(key.startswith(AVERAGE_PREFIX) for key in held):
        raise CheckpointError(
            f"{reader.path} holds no average of the weights: set --ema-decay 0, or start a new run from an export"
        )
    if absent:
        raise CheckpointError(f"{reader.path} lacks {some(absent)}; load another checkpoint")
