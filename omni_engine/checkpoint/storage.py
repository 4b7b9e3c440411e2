# SPDX-License-Identifier: Apache-2.0
"""Megatron's `torch_dist` files, written in this process and read without running what stands in them.

Megatron's own writer starts a helper process by "spawn", which imports the main module anew and takes seconds, and a
fault of one rank before it writes leaves the others waiting. Its files are those of `torch.distributed.checkpoint`,
whose writer does neither; Megatron reads what is written here (`test_megatron_reads_the_folder`).

Of a checkpoint only two kinds of content are pickles: `.metadata`, the table of contents, is read by an unpickler that
knows the classes of that table and no other; tensors are read by torch with `weights_only=True`. `common.pt` is written
empty, for Megatron's sake, and never read: what is not a tensor stands in JSON files.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from torch.distributed import checkpoint
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from omni_engine.checkpoint.errors import CheckpointError, some
from omni_engine.parallel import ParallelGroups

METADATA_FILE = ".metadata"
_BACKEND, _VERSION = "torch_dist", 1


def write_tensors(folder: Path, state: dict[str, Any], groups: ParallelGroups) -> None:
    """Write the sharded tensors of all ranks into an empty folder, and flush them. A collective.

    Each rank writes one file, `__RANK_0.distcp`, the replicas of a tensor sharing the work.

    Raises:
        torch.distributed.checkpoint.api.CheckpointException: on every rank, if one of them cannot write.
    """
    tensors, _ = save_preprocess(state)
    strategy: Any = _SaveInProcess(_BACKEND, _VERSION)
    if groups.dp_cp.size() > 1:
        strategy = FullyParallelSaveStrategyWrapper(strategy, groups.dp_cp)
    strategy.save(tensors, folder)


def megatron_files() -> dict[str, bytes]:
    """Name and content of the small files by which Megatron knows the format."""
    empty = io.BytesIO()
    torch.save({}, empty)
    config = CheckpointingConfig(_BACKEND, _VERSION)
    return {CONFIG_FNAME: json.dumps(asdict(config)).encode(), COMMON_STATE_FNAME: empty.getvalue()}


def read_tensors(reader: CheckedReader, state: dict[str, Any]) -> dict[str, Any]:
    """Fill the tensors of a sharded state, which must fit the table of contents. A collective.

    Returns: the state with plain tensors, fused ones made of their sources.

    Raises:
        torch.distributed.checkpoint.api.CheckpointException: on every rank, if one of them cannot read.
    """
    tensors, _, factories = load_preprocess(state)
    checkpoint.load(
        _for_torch(list(nested_values(tensors))),
        storage_reader=reader,
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    plain: dict[str, Any] = dict_list_map_outplace(lambda tensor: tensor.data, tensors)
    apply_factory_merges(plain, factories)
    return plain


def _for_torch(tensors: Sequence[ShardedTensor]) -> dict[str, Any]:
    """Tensors by key, with their place in the whole, as torch's planners take them."""
    for tensor in tensors:
        tensor.data = tensor.data.detach()
    return {tensor.key: CheckpointableShardedTensor.from_sh_ten(tensor) for tensor in tensors}


class _Writer(FileSystemWriter):
    """Torch's writer, which keeps the temporary folder's path out of the table of contents and says why it failed."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # Closing the archive after a failed write fails too, which hides that the disk is full.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class _SaveInProcess(SaveShardedStrategy):
    """Megatron's interface to the saving of this rank's part."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        mine = [tensor for tensor in nested_values(sharded_state_dict) if is_main_replica(tensor.replica_id)]
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        checkpoint.save(_for_torch(mine), storage_writer=_Writer(checkpoint_dir), planner=planner)

    def can_handle_sharded_objects(self) -> bool:
        return False


class _TableUnpickler(pickle.Unpickler):
    """Knows the plain data classes of a table of contents: making one runs nothing."""

    allowed = frozenset(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
            *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ) | {
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.allowed:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"it names '{module}.{name}', which has no place there and was not loaded; do not use this checkpoint "
            "unless you know who wrote it"
        )


class CheckedReader(FileSystemReader):
    """Reads the files of a checkpoint by its table of contents.

    Raises:
        CheckpointError: the table cannot be read, or holds what this engine does not write.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.metadata = self._read_table(folder / METADATA_FILE)

    def _read_table(self, file: Path) -> Metadata:
        try:
            with file.open("rb") as stream:
                table = _TableUnpickler(stream).load()
            if not isinstance(table, Metadata) or not isinstance(table.storage_data, dict):
                raise CheckpointError("it is no table of contents")
            entries = table.state_dict_metadata.items()
            others = {key for key, entry in entries if not isinstance(entry, TensorStorageMetadata)}
            if others:
                raise CheckpointError(f"{some(others)} is no tensor")
            paths = {place.relative_path for place in table.storage_data.values()}
            elsewhere = {path for path in paths if Path(path).name != path}
            if elsewhere:
                raise CheckpointError(f"it names {some(elsewhere)}, which does not lie beside it")
        except FileNotFoundError as error:
            raise CheckpointError(f"{file} does not exist; the checkpoint is incomplete, load another one") from error
        except CheckpointError as error:
            raise CheckpointError(f"{file} is refused: {error}") from error
        # A damaged pickle raises about anything.
        except Exception as error:
            raise CheckpointError(f"{file} is damaged ({error}); load another checkpoint") from error
        if table.storage_meta is None:
            table.storage_meta = StorageMeta()
        return table

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """What the checkpoint holds, by key: whole shapes and dtypes."""
        return self.metadata.state_dict_metadata  # type: ignore[return-value]
