# SPDX-License-Identifier: Apache-2.0
"""Import of a transformer folder in Hugging Face form, through the family's mapping table.

Only safetensors are read: a format that cannot run code. A rank reads just the rows and columns that it holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from omni_engine.checkpoint.errors import CheckpointError, on_all_ranks, some
from omni_engine.models.mapping import ModelMapping, ParameterMapping
from omni_engine.parallel import ParallelGroups

SINGLE_FILE = "diffusion_pytorch_model.safetensors"
INDEX_FILE = "diffusion_pytorch_model.safetensors.index.json"


class SafetensorsFolder:
    """The tensors of a folder's safetensors files by name, opened lazily.

    Raises:
        CheckpointError: files are missing, truncated or not safetensors, or the index does not describe them.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        index = folder / INDEX_FILE
        weight_map = _read_index(index) if index.exists() else None
        files = [SINGLE_FILE] if weight_map is None else sorted(set(weight_map.values()))
        self._handles = {name: _open(folder / name) for name in files}
        self._file_of = {key: name for name, handle in self._handles.items() for key in handle.keys()}  # noqa: SIM118
        if weight_map is not None and weight_map != self._file_of:
            lost = {key for key, _ in weight_map.items() ^ self._file_of.items()}
            raise CheckpointError(f"{index} and the files beside it disagree about {some(lost)}; copy the folder anew")

    @property
    def names(self) -> set[str]:
        """All tensors of the folder."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a tensor."""
        return tuple(self._handles[self._file_of[name]].get_slice(name).get_shape())

    def whole(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors by name, one at a time, as a model of that dtype holds them."""
        for name in sorted(self.names):
            yield name, self.read(name, None, 0, 1).to(dtype)

    def read(self, name: str, shard_dim: int | None, rank: int, size: int) -> torch.Tensor:
        """A rank's share of a tensor along `shard_dim` (0 or 1), or all of it.

        Raises:
            CheckpointError: the tensor does not divide, or cannot be read.
        """
        handle = self._handles[self._file_of[name]]
        try:
            if shard_dim is None or size == 1:
                return handle.get_tensor(name)
            extent = self.shape(name)[shard_dim]
            if extent % size:
                raise CheckpointError(
                    f"dim {shard_dim} of '{name}' has {extent} entries, which do not divide over "
                    f"--tensor-model-parallel-size {size}"
                )
            share = slice(rank * (extent // size), (rank + 1) * (extent // size))
            rows = handle.get_slice(name)
            return rows[share] if shard_dim == 0 else rows[:, share]
        except SafetensorError as error:
            raise CheckpointError(
                f"'{name}' in {self.folder / self._file_of[name]} cannot be read ({error})"
            ) from error


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = set(weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read ({error!r}); copy the folder anew") from error
    elsewhere = {str(file) for file in files if not isinstance(file, str) or Path(file).name != file}
    if elsewhere:
        raise CheckpointError(f"{index} names {some(elsewhere)}, which does not lie beside it")
    return dict(weight_map)


def _open(file: Path) -> Any:
    if not file.exists():
        raise CheckpointError(f"{file} does not exist; the model folder is incomplete, copy or download it again")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); it may be truncated, copy it anew") from error


@torch.no_grad()
def load_transformer(
    parameters: Mapping[str, torch.nn.Parameter], mapping: ModelMapping, folder: Path, groups: ParallelGroups
) -> None:
    """Fill a rank's parameters (`Policy.parameters`) from a transformer folder; values are cast to the parameters'
    dtype. A collective.

    Raises:
        CheckpointError: on every rank: the folder holds other names or shapes than the model, or values that are not
            finite.
    """
    with on_all_ranks(f"{folder} cannot be loaded"):
        tensors = SafetensorsFolder(folder)
        missing, unexpected = mapping.source_names - tensors.names, tensors.names - mapping.source_names
        if missing or unexpected:
            raise CheckpointError(
                f"{folder} does not fit the model: missing {some(missing)}; unexpected {some(unexpected)}; "
                "check that config.json and the weights belong together"
            )
        for path, entry in mapping.of(parameters).items():
            _fill(parameters[path], entry, tensors, groups)


def _fill(
    parameter: torch.nn.Parameter, entry: ParameterMapping, tensors: SafetensorsFolder, groups: ParallelGroups
) -> None:
    for source, target in zip(entry.sources, entry.split(parameter.data), strict=True):
        value = tensors.read(source, entry.shard_dim, groups.tp_rank, groups.tp_size)
        if value.shape != target.shape:
            raise CheckpointError(
                f"'{source}' in {tensors.folder} has shape {tuple(value.shape)} on this rank, the model expects "
                f"{tuple(target.shape)}; check that config.json and the weights belong together"
            )
        # What the parameter can hold counts: a large float32 value is infinite in float16.
        target.copy_(value)
        if not bool(torch.isfinite(target).all()):
            raise CheckpointError(f"'{source}' in {tensors.folder} holds values that are not finite in {target.dtype}")
