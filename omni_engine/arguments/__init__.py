# SPDX-License-Identifier: Apache-2.0
"""Settings: the only place that defines flags, configuration keys and their rules.

One dataclass a concern (model.py, parallel.py, ...) declares its flags with `flag(...)`; the parser, the YAML keys,
`args.json` and docs/flags.md follow from it. Nothing else of omni_engine is imported here, and torch is not needed.
"""

from __future__ import annotations

from omni_engine.arguments.algorithm import AlgorithmSettings
from omni_engine.arguments.checkpoint import CheckpointSettings
from omni_engine.arguments.checkpoint_folder import newest_iteration, where_to_continue
from omni_engine.arguments.data import DataSettings
from omni_engine.arguments.ema import EmaSettings
from omni_engine.arguments.faults import Fault, SettingsError
from omni_engine.arguments.logging import LoggingSettings
from omni_engine.arguments.lora import LoraSettings
from omni_engine.arguments.model import ModelSettings
from omni_engine.arguments.optimizer import OptimizerSettings
from omni_engine.arguments.parallel import ParallelSettings
from omni_engine.arguments.parser import load_settings, parse_settings, settings_from_dict
from omni_engine.arguments.reward import RewardSettings
from omni_engine.arguments.rollout import RolloutSettings
from omni_engine.arguments.settings import Settings
from omni_engine.arguments.training import TrainingSettings
from omni_engine.arguments.validate import validate

__all__ = [
    "AlgorithmSettings",
    "CheckpointSettings",
    "DataSettings",
    "EmaSettings",
    "Fault",
    "LoggingSettings",
    "LoraSettings",
    "ModelSettings",
    "OptimizerSettings",
    "ParallelSettings",
    "RewardSettings",
    "RolloutSettings",
    "Settings",
    "SettingsError",
    "TrainingSettings",
    "load_settings",
    "newest_iteration",
    "parse_settings",
    "settings_from_dict",
    "validate",
    "where_to_continue",
]
