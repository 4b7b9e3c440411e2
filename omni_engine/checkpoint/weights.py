# SPDX-License-Identifier: Apache-2.0
"""The weights of a checkpoint, read in one process without a model or a process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException

from omni_engine.checkpoint.errors import CheckpointError, some
from omni_engine.checkpoint.folder import verify_files
from omni_engine.checkpoint.huggingface import SafetensorsFolder
from omni_engine.checkpoint.lora_files import adapted_shapes
from omni_engine.checkpoint.record import SavedRun
from omni_engine.checkpoint.sharded import AVERAGE_PREFIX, is_weight_key
from omni_engine.checkpoint.storage import CheckedReader


class SavedWeights:
    """A checkpoint's weights by Hugging Face name. Whatever layout wrote it, they come out whole.

    Attributes:
        lora: rank, alpha and target modules where they are those of adapters; None where they are the whole model.
        base: fingerprint of the model that the run started from, where the run has saved it.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or the average that is asked for is not in it.
    """

    def __init__(self, root: Path, iteration: int | None = None, average: bool = False):
        """`average`: give the moving average of the weights in their place, in their dtype."""
        saved = SavedRun(root, iteration)
        verify_files(saved.folder, saved.files)
        self.iteration = saved.loaded.iteration
        self.lora: dict[str, Any] | None = saved.lora
        self.base: str | None = saved.loaded.state.get("model_sha256")
        self._reader = CheckedReader(saved.folder)
        self._entries = {key: entry for key, entry in self._reader.tensors.items() if is_weight_key(key)}
        self._prefix = AVERAGE_PREFIX if average else ""
        if average and not any(key.startswith(AVERAGE_PREFIX) for key in self._reader.tensors):
            raise CheckpointError(f"{saved.folder} holds no average of the weights: its run had no --ema-decay")

    def check_fits(self, transformer: Path) -> None:
        """Compare names and shapes with those of a transformer folder.

        Raises:
            CheckpointError: they are not of one model.
        """
        original = SafetensorsFolder(transformer)
        shapes = {name: tuple(entry.size) for name, entry in self._entries.items()}
        if self.lora is not None:
            fitting = adapted_shapes(shapes)
            shapes = {name: original.shape(name) for name in original.names} | fitting
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
            # What was not trained has no average.
            key = self._prefix + name if self._prefix + name in self._reader.tensors else name
            tensor = torch.empty(entry.size, dtype=self._reader.tensors[key].properties.dtype)
            try:
                with warnings.catch_warnings():
                    # It tells that there is no process group.
                    warnings.simplefilter("ignore", UserWarning)
                    checkpoint.load({key: tensor}, storage_reader=self._reader, planner=planner, no_dist=True)
            except CheckpointException as error:
                raise CheckpointError(f"'{key}' in {self._reader.path} cannot be read: {error}") from error
            yield name, tensor.to(entry.properties.dtype)
