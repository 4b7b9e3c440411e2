# SPDX-License-Identifier: Apache-2.0
"""Weights and runs on disk: import and export of Hugging Face folders, checkpoints to resume from."""

from omni_engine.checkpoint.errors import CheckpointError
from omni_engine.checkpoint.fingerprint import model_fingerprint
from omni_engine.checkpoint.folder import latest_iteration
from omni_engine.checkpoint.hf_export import (
    check_export_target,
    export_pipeline,
    export_policy,
    write_adapters,
    write_pipeline,
)
from omni_engine.checkpoint.huggingface import SafetensorsFolder, load_transformer
from omni_engine.checkpoint.lora_files import merged
from omni_engine.checkpoint.record import LoadedState, check_same_run, read_state
from omni_engine.checkpoint.torch_dist import load_checkpoint, save_checkpoint
from omni_engine.checkpoint.weights import SavedWeights

__all__ = [
    "CheckpointError",
    "LoadedState",
    "SafetensorsFolder",
    "SavedWeights",
    "check_export_target",
    "check_same_run",
    "export_pipeline",
    "export_policy",
    "latest_iteration",
    "load_checkpoint",
    "load_transformer",
    "merged",
    "model_fingerprint",
    "read_state",
    "save_checkpoint",
    "write_adapters",
    "write_pipeline",
]
