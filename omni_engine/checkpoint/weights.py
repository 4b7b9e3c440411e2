# SPDX-License-Identifier: Apache-2.0
"""The weights of a checkpoint, read in one process without a model or a process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException

from omni_engine.checkpoint.errors import CheckpointError, some
from omni_engine.checkpoint.folder import verify_files
from omni_engine.checkpoint.huggingface import SafetensorsFolder
from omni_engine.checkpoint.record import SavedRun
from omni_engine.checkpoint.sharded import is_optimizer_key
from omni_engine.checkpoint.storage import CheckedReader


class SavedWeights:
    """A checkpoint's weights by Hugging Face name. Whatever layout wrote it, they come out whole.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """

    def __init__(self, root: Path, iteration: int | None = None):
        saved = SavedRun(root, iteration)
        verify_files(saved.folder, saved.files)
        self.iteration = saved.loaded.iteration
        self._reader = CheckedReader(saved.folder)
        self._entries = {key: entry for key, entry in self._reader.tensors.items() if not is_optimizer_key(key)}

    def check_fits(self, transformer: Path) -> None:
        """Compare names and shapes with those of a transformer folder.

        Raises:
            CheckpointError: they are not of one model.
        """
        original = SafetensorsFolder(transformer)
        shapes = {name: tuple(entry.size) for name, entry in self._entries.items()}
        lacking, besides = original.names - set(shapes), set(shapes) - original.names
        other = {name for name in original.names & set(shapes) if original.shape(name) != shapes[name]}
        if lacking or besides or other:
            raise CheckpointError(
                f"{self._reader.path} is not of the model in {transformer}: it lacks {some(lacking)}, holds "
                f"{some(besides)} besides, and has other shapes of {some(other)}; give the model that the run was "
                "started from"
            )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors on the host, one at a time."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        for name, entry in sorted(self._entries.items()):
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
            try:
                with warnings.catch_warnings():
                    # It tells that there is no process group.
                    warnings.simplefilter("ignore", UserWarning)
                    checkpoint.load({name: tensor}, storage_reader=self._reader, planner=planner, no_dist=True)
            except CheckpointException as error:
                raise CheckpointError(f"'{name}' in {self._reader.path} cannot be read: {error}") from error
            yield name, tensor
