# SPDX-License-Identifier: Apache-2.0
"""Import and export of a transformer folder in Hugging Face form, through the family's mapping table.

Only safetensors are read: a format that cannot run code. A rank reads just the rows and columns that it holds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from omni_engine.models.mapping import ModelMapping, ParameterMapping
from omni_engine.parallel import ParallelGroups

SINGLE_FILE = "diffusion_pytorch_model.safetensors"
INDEX_FILE = "diffusion_pytorch_model.safetensors.index.json"
SHARD_BYTES = 10 * 2**30


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message says what, where and the remedy."""


class SafetensorsFolder:
    """The tensors of a folder's safetensors files by name, opened lazily.

    Raises:
        CheckpointError: files are missing, truncated or not safetensors.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.file_of: dict[str, Path] = {}
        index = folder / INDEX_FILE
        if index.exists():
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted({folder / name for name in weight_map.values()})
        else:
            files = [folder / SINGLE_FILE]
        for file in files:
            with self._open(file) as handle:
                self.file_of.update({name: file for name in handle.keys()})  # noqa: SIM118 - not a dict
        if index.exists() and set(weight_map) != set(self.file_of):
            lost = sorted(set(weight_map) ^ set(self.file_of))
            raise CheckpointError(f"{index} and the files beside it disagree about {_some(lost)}; copy the folder anew")

    def _open(self, file: Path) -> safe_open:
        if not file.exists():
            raise CheckpointError(f"{file} does not exist; the model folder is incomplete, copy or download it again")
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); it may be truncated, copy it anew") from error

    def read(self, name: str, shard_dim: int | None, rank: int, size: int) -> torch.Tensor:
        """A rank's share of a tensor along `shard_dim`, or all of it."""
        with self._open(self.file_of[name]) as handle:
            try:
                if shard_dim is None or size == 1:
                    return handle.get_tensor(name)
                rows = handle.get_slice(name)
                extent = rows.get_shape()[shard_dim]
                if extent % size:
                    raise CheckpointError(
                        f"dim {shard_dim} of '{name}' has {extent} entries, which do not divide over "
                        f"--tensor-model-parallel-size {size}"
                    )
                share = slice(rank * (extent // size), (rank + 1) * (extent // size))
                return rows[share] if shard_dim == 0 else rows[:, share]
            except SafetensorError as error:
                raise CheckpointError(f"'{name}' in {self.file_of[name]} cannot be read ({error})") from error


@torch.no_grad()
def load_transformer(stage: torch.nn.Module, mapping: ModelMapping, folder: Path, groups: ParallelGroups) -> None:
    """Fill a stage's parameters from a transformer folder; values are cast to the parameters' dtype.

    Raises:
        CheckpointError: the folder holds other names or shapes than the model, or values that are not finite.
    """
    tensors = SafetensorsFolder(folder)
    missing = sorted(mapping.source_names - set(tensors.file_of))
    unexpected = sorted(set(tensors.file_of) - mapping.source_names)
    if missing or unexpected:
        raise CheckpointError(
            f"{folder} does not fit the model: missing {_some(missing)}; unexpected {_some(unexpected)}; "
            "check that config.json and the weights belong together"
        )
    parameters = dict(stage.named_parameters())
    for path, entry in mapping.of(parameters).items():
        for source, target in zip(entry.sources, entry.split(parameters[path].data), strict=True):
            value = tensors.read(source, entry.shard_dim, groups.tp_rank, groups.tp_size)
            if value.shape != target.shape:
                raise CheckpointError(
                    f"'{source}' in {folder} has shape {tuple(value.shape)} on this rank, the model expects "
                    f"{tuple(target.shape)}; check that config.json and the weights belong together"
                )
            if not bool(torch.isfinite(value).all()):
                raise CheckpointError(f"'{source}' in {folder} holds values that are not finite")
            target.copy_(value)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4]) or "nothing"
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def full_tensors(
    stage: torch.nn.Module, mapping: ModelMapping, groups: ParallelGroups
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every tensor of the model by its Hugging Face name, one at a time, gathered from the stages and TP ranks.

    A collective of one model replica: all its ranks iterate. The tensor is given to global rank 0's replica source and
    is None elsewhere.
    """
    parameters = dict(stage.named_parameters())
    owned = [sorted(parameters)]
    if groups.pp_size > 1:
        owned = [[] for _ in range(groups.pp_size)]
        dist.all_gather_object(owned, sorted(parameters), group=groups.pp)
    for pp_rank, paths in enumerate(owned):
        for path in paths:
            entry = mapping.entries[path]
            yield from _gather_parameter(parameters.get(path), entry, pp_rank, groups)


def _gather_parameter(
    local: torch.Tensor | None, entry: ParameterMapping, pp_rank: int, groups: ParallelGroups
) -> Iterator[tuple[str, torch.Tensor | None]]:
    pieces: tuple[torch.Tensor | None, ...] = (None,) * len(entry.sources)
    if pp_rank == groups.pp_rank:
        assert local is not None
        pieces = tuple(_gather_tp(piece, entry.shard_dim, groups) for piece in entry.split(local.detach()))
    for name, piece in zip(entry.sources, pieces, strict=True):
        yield name, _to_source(piece, pp_rank, groups)


def _gather_tp(piece: torch.Tensor, dim: int | None, groups: ParallelGroups) -> torch.Tensor:
    if dim is None or groups.tp_size == 1:
        return piece.contiguous()
    parts = [torch.empty_like(piece) for _ in range(groups.tp_size)]
    dist.all_gather(parts, piece.contiguous(), group=groups.tp)
    return torch.cat(parts, dim)


def _to_source(piece: torch.Tensor | None, pp_rank: int, groups: ParallelGroups) -> torch.Tensor | None:
    """Move a gathered tensor from its stage to the first stage (same TP rank)."""
    if groups.pp_size == 1 or pp_rank == 0:
        return piece.cpu() if piece is not None and groups.is_model_source else None
    ranks = dist.get_process_group_ranks(groups.pp)
    box = [None if piece is None else (tuple(piece.shape), piece.dtype)]
    dist.broadcast_object_list(box, ranks[pp_rank], group=groups.pp)
    assert box[0] is not None
    if groups.pp_rank == pp_rank:
        assert piece is not None
        dist.send(piece, ranks[0], group=groups.pp)
    elif groups.pp_rank == 0:
        shape, dtype = box[0]
        from omni_engine.platform import get_platform

        piece = torch.empty(shape, dtype=dtype, device=get_platform().device())
        dist.recv(piece, ranks[pp_rank], group=groups.pp)
        return piece.cpu() if groups.is_model_source else None
    return None


def export_pipeline(
    stage: torch.nn.Module, mapping: ModelMapping, source: Path, target: Path, groups: ParallelGroups
) -> None:
    """Write a pipeline folder that `DiffusionPipeline.from_pretrained` loads: the trained transformer, and the other
    components copied from the folder the run started from. A collective of the first replica's ranks.

    The folder is written beside its place and renamed when whole. Weights are written in the parameters' dtype.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    writer = groups.rank == 0
    partial = target.with_name(target.name + ".partial")
    try:
        if writer:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(source, partial, ignore=shutil.ignore_patterns("*.safetensors*", "README.md"))
            _copy_other_weights(source, partial)
        _write_shards(full_tensors(stage, mapping, groups), partial / "transformer", writer)
        if writer:
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
    except OSError as error:
        raise CheckpointError(f"the pipeline cannot be written to {target}: {error}; free space or choose another "
                              "--export-hf") from error


def _copy_other_weights(source: Path, target: Path) -> None:
    for file in source.rglob("*.safetensors*"):
        relative = file.relative_to(source)
        if relative.parts[0] != "transformer":
            shutil.copy2(file, target / relative)


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor | None]], folder: Path, writer: bool) -> None:
    """Stream tensors into safetensors shards of bounded size, then write the index where there are several."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal pending, size
        save_file(pending, folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(sorted(pending))
        pending, size = {}, 0

    total = 0
    for name, tensor in tensors:
        if not writer or tensor is None:
            continue
        if pending and size + tensor.nbytes > SHARD_BYTES:
            flush()
        pending[name] = tensor.clone().contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    if not writer:
        return
    flush()
    if len(shards) == 1:
        (folder / "shard-0.safetensors").rename(folder / SINGLE_FILE)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"diffusion_pytorch_model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}.safetensors").rename(folder / file)
        weight_map.update({name: file for name in names})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
