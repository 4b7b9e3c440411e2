# SPDX-License-Identifier: Apache-2.0
"""Export of a trained transformer as a pipeline folder that `DiffusionPipeline.from_pretrained` loads.

The transformer's weights are new; all other components are copied from the folder that the run started from.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from omni_engine.checkpoint.errors import CheckpointError
from omni_engine.checkpoint.huggingface import INDEX_FILE, SINGLE_FILE
from omni_engine.models.mapping import ModelMapping, ParameterMapping
from omni_engine.parallel import ParallelGroups

SHARD_BYTES = 10 * 2**30
TRANSFORMER = "transformer"
PIPELINE_FILE = "model_index.json"


def export_pipeline(
    parameters: Mapping[str, torch.nn.Parameter],
    mapping: ModelMapping,
    source: Path,
    target: Path,
    groups: ParallelGroups,
) -> None:
    """Write the trained policy as a pipeline folder, in the parameters' dtype.

    A collective of one model replica's ranks, that of global rank 0, which writes. Tensors are gathered one by one; the
    writer's host holds up to SHARD_BYTES of them.

    Raises:
        CheckpointError: on rank 0, the folder cannot be written; the others have done their part all the same.
    """
    tensors = _whole_tensors(parameters, mapping, groups)
    try:
        if groups.rank == 0:
            write_pipeline(tensors, source, target)
    finally:
        # The gathers go on to the end even if nothing is written any more: peers are in them.
        for _ in tensors:
            pass


def check_export_target(source: Path, target: Path) -> None:
    """Refuse a target that must not be replaced.

    Raises:
        CheckpointError: it is, holds or lies in the source folder, or is a folder of something else.
    """
    inner, outer = source.resolve(), target.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise CheckpointError(f"the export to {target} would overwrite {source}, which it copies from; choose another")
    if target.exists() and not (target / PIPELINE_FILE).exists() and (target.is_file() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is no exported pipeline; choose another folder for the export")


def write_pipeline(tensors: Iterator[tuple[str, torch.Tensor]], source: Path, target: Path) -> None:
    """Write a pipeline folder from the transformer's tensors and another pipeline's other components.

    It is written beside its place and renamed when whole; a pipeline that lay there is replaced.

    Raises:
        CheckpointError: the folder cannot be written, or must not be.
    """
    check_export_target(source, target)
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        # The model card tells of the other model.
        shutil.copytree(source, partial, ignore=lambda folder, names: _left_out(Path(folder), names, source))
        _write_shards(tensors, partial / TRANSFORMER)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the pipeline cannot be written to {target} ({error}); free space there or choose another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _left_out(folder: Path, names: list[str], source: Path) -> list[str]:
    if folder == source:
        return [name for name in names if name in ("README.md", ".git", ".gitattributes", ".cache")]
    if folder == source / TRANSFORMER:
        return [name for name in names if ".safetensors" in name or ".bin" in name]
    return []


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Stream tensors into safetensors files of bounded size, and the index where there are several."""
    shards: list[dict[str, int]] = []
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in pending.items()})
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(held.nbytes for held in pending.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        pending[name] = tensor
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE_FILE)
        return
    weight_map = {}
    for number, sizes in enumerate(shards):
        file = f"diffusion_pytorch_model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map.update(dict.fromkeys(sizes, file))
    index = {"metadata": {"total_size": sum(sum(sizes.values()) for sizes in shards)}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")


@dataclass(frozen=True)
class _Held:
    """A parameter of a stage: what the first stage has to know to receive it."""

    path: str
    shape: torch.Size
    dtype: torch.dtype


def _whole_tensors(
    parameters: Mapping[str, torch.nn.Parameter], mapping: ModelMapping, groups: ParallelGroups
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model by its Hugging Face name, gathered one parameter at a time.

    All ranks of a replica iterate. The whole tensors, on the host, come out on its source rank, nothing elsewhere.
    """
    device = next(iter(parameters.values())).device
    own = [_Held(path, parameter.shape, parameter.dtype) for path, parameter in sorted(parameters.items())]
    stages: list[list[_Held]] = [own] * groups.pp_size
    if groups.pp_size > 1:
        dist.all_gather_object(stages, own, group=groups.pp)
    for pp_rank, held in enumerate(stages):
        for parameter in held:
            entry = mapping.entries[parameter.path]
            whole: torch.Tensor | None = None
            if pp_rank == groups.pp_rank:
                whole = _gather_tensor_parallel(parameters[parameter.path].detach(), entry, groups)
            if pp_rank > 0 and groups.tp_rank == 0 and groups.cp_rank == 0:
                whole = _to_first_stage(whole, parameter, entry, pp_rank, device, groups)
            if groups.is_model_source and whole is not None:
                for name, piece in zip(entry.sources, entry.split(whole), strict=True):
                    yield name, piece.to("cpu", copy=True).contiguous()


def _gather_tensor_parallel(local: torch.Tensor, entry: ParameterMapping, groups: ParallelGroups) -> torch.Tensor:
    """The whole parameter, its sources in order."""
    if entry.shard_dim is None or groups.tp_size == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(groups.tp_size)]
    dist.all_gather(parts, local.contiguous(), group=groups.tp)
    sources = zip(*(entry.split(part) for part in parts), strict=True)
    return torch.cat([torch.cat(pieces, entry.shard_dim) for pieces in sources])


def _to_first_stage(
    whole: torch.Tensor | None,
    held: _Held,
    entry: ParameterMapping,
    pp_rank: int,
    device: torch.device,
    groups: ParallelGroups,
) -> torch.Tensor | None:
    """Send a whole parameter from its stage to the first one."""
    ranks = dist.get_process_group_ranks(groups.pp)
    if groups.pp_rank == pp_rank and whole is not None:
        dist.send(whole.contiguous(), ranks[0], group=groups.pp)
    elif groups.pp_rank == 0:
        shape = list(held.shape)
        if entry.shard_dim is not None:
            shape[entry.shard_dim] *= groups.tp_size
        whole = torch.empty(shape, dtype=held.dtype, device=device)
        dist.recv(whole, ranks[pp_rank], group=groups.pp)
        return whole
    return None
