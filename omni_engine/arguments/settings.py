# SPDX-License-Identifier: Apache-2.0
"""`Settings`: every concern's dataclass in one object, and its plain form for `args.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_engine.arguments.algorithm import AlgorithmSettings
from omni_engine.arguments.checkpoint import CheckpointSettings
from omni_engine.arguments.data import DataSettings
from omni_engine.arguments.ema import EmaSettings
from omni_engine.arguments.flag import Flag, flags_of
from omni_engine.arguments.logging import LoggingSettings
from omni_engine.arguments.lora import LoraSettings
from omni_engine.arguments.model import ModelSettings
from omni_engine.arguments.optimizer import OptimizerSettings
from omni_engine.arguments.parallel import ParallelSettings
from omni_engine.arguments.reward import RewardSettings
from omni_engine.arguments.rollout import RolloutSettings
from omni_engine.arguments.training import TrainingSettings


@dataclass(frozen=True)
class Settings:
    """All settings of a run, one dataclass a concern. A part of the engine is given its own one, never this."""

    model: ModelSettings
    lora: LoraSettings
    parallel: ParallelSettings
    rollout: RolloutSettings
    algorithm: AlgorithmSettings
    optimizer: OptimizerSettings
    ema: EmaSettings
    training: TrainingSettings
    data: DataSettings
    reward: RewardSettings
    checkpoint: CheckpointSettings
    logging: LoggingSettings

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(self.logging.runs_dir) / self.logging.run_name

    @property
    def save_dir(self) -> Path:
        """Folder of this run's checkpoints."""
        return Path(self.checkpoint.save) if self.checkpoint.save is not None else self.run_dir / "checkpoints"

    def values(self) -> dict[str, Any]:
        """Typed value of every flag by flag name (names are unique over all concerns)."""
        return {flag.name: getattr(getattr(self, flag.group), flag.name) for flag in FLAGS.values()}

    def to_dict(self) -> dict[str, Any]:
        """Plain form: flag name to a value that JSON and YAML hold. Written as `args.json` it is a valid `--config`."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self.values().items()}

    def describe(self) -> str:
        """The resolved set for people: every flag with its value, by concern."""
        lines = ["------------------------ settings ------------------------"]
        for group, flags in GROUPS.items():
            lines.append(f"{group}:")
            lines += [
                f"  {flag.name} {'.' * (36 - len(flag.name))} {getattr(getattr(self, group), flag.name)}"
                for flag in flags
            ]
        return "\n".join([*lines, "-" * len(lines[0])])

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from typed values by flag name; a flag that is absent takes its default.

        Raises:
            TypeError: a flag without a default is absent.
        """
        return cls(
            **{
                group: concern(**{flag.name: values[flag.name] for flag in flags if flag.name in values})
                for group, concern, flags in ((group, CONCERNS[group], GROUPS[group]) for group in CONCERNS)
            }
        )


CONCERNS: dict[str, type] = {
    "model": ModelSettings,
    "lora": LoraSettings,
    "parallel": ParallelSettings,
    "rollout": RolloutSettings,
    "algorithm": AlgorithmSettings,
    "optimizer": OptimizerSettings,
    "ema": EmaSettings,
    "training": TrainingSettings,
    "data": DataSettings,
    "reward": RewardSettings,
    "checkpoint": CheckpointSettings,
    "logging": LoggingSettings,
}
"""Field of `Settings` to its dataclass, in the order of the help and of the reference."""

GROUPS: dict[str, tuple[Flag, ...]] = {group: flags_of(concern, group) for group, concern in CONCERNS.items()}
"""Flags by concern."""

FLAGS: dict[str, Flag] = {flag.name: flag for flags in GROUPS.values() for flag in flags}
"""Every flag by name."""
