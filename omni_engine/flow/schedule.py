# SPDX-License-Identifier: Apache-2.0
"""Sigma schedules: one table per (scheduler config, number of steps, image size), computed on the host."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SCHEDULER_CLASS = "FlowMatchEulerDiscreteScheduler"


@dataclass(frozen=True, eq=False)
class Schedule:
    """The sigmas a trajectory passes through and the model times at its N steps. Steps are addressed by index.

    sigmas: float32 [N + 1] on the host, strictly falling within [0, 1]; step i goes from sigmas[i] to sigmas[i + 1].
    timesteps: float32 [N] on the host, the model's time at step i (num_train_timesteps * sigma). Keep it float32 up to
        the sinusoid: bf16 moves a timestep by up to 4 in 1000.

    Two schedules are equal when every bit of both tables is. Raises TypeError or ValueError on anything else.
    """

    sigmas: Tensor
    timesteps: Tensor

    def __post_init__(self) -> None:
        for name, table in (("sigmas", self.sigmas), ("timesteps", self.timesteps)):
            if table.dtype != torch.float32 or table.dim() != 1:
                raise TypeError(
                    f"Schedule.{name} must be a float32 vector, got {table.dtype} {list(table.shape)}: "
                    "build it with flow_match_schedule"
                )
            if not torch.isfinite(table).all():
                raise ValueError(f"Schedule.{name} holds a value that is not finite: {table.tolist()}")
        if len(self.timesteps) < 1 or len(self.sigmas) != len(self.timesteps) + 1:
            raise ValueError(
                f"a schedule of N >= 1 steps has N + 1 sigmas and N timesteps, got {len(self.sigmas)} sigmas and "
                f"{len(self.timesteps)} timesteps: the last sigma is the end point of the last step"
            )
        falling = bool((self.sigmas[1:] < self.sigmas[:-1]).all())
        if not falling or float(self.sigmas[0]) > 1.0 or float(self.sigmas[-1]) < 0.0:
            raise ValueError(
                f"sigmas must fall strictly from at most 1 to at least 0, got {self.sigmas.tolist()}: "
                "use fewer steps or another shift"
            )

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)

    def fingerprint(self) -> str:
        """Hex digest of both tables' bits: what two engines compare before their log-probs may meet."""
        digest = hashlib.sha256(f"N={self.num_steps}".encode())
        for table in (self.sigmas, self.timesteps):
            digest.update(table.detach().cpu().numpy().astype("<f4").tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self.fingerprint())


@dataclass(frozen=True)
class SchedulerConfig:
    """The settings of a Hugging Face `scheduler/scheduler_config.json` (FlowMatchEulerDiscreteScheduler).

    Names and defaults are diffusers'. Raises ValueError for an option that `flow_match_schedule` does not implement:
    a schedule that quietly differs from the model's own is worse than none.
    """

    num_train_timesteps: int = 1000
    shift: float = 1.0
    use_dynamic_shifting: bool = False
    base_shift: float | None = 0.5
    max_shift: float | None = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    invert_sigmas: bool = False
    shift_terminal: float | None = None
    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    use_beta_sigmas: bool = False
    time_shift_type: str = "exponential"
    stochastic_sampling: bool = False

    def __post_init__(self) -> None:
        unsupported = ("invert_sigmas", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
        faults = [
            f"{name}={getattr(self, name)!r} is not implemented, only false"
            for name in (*unsupported, "stochastic_sampling")
            if getattr(self, name)
        ]
        if self.time_shift_type not in ("exponential", "linear"):
            faults.append(f"time_shift_type={self.time_shift_type!r} is neither 'exponential' nor 'linear'")
        if self.use_dynamic_shifting and (self.base_shift is None or self.max_shift is None):
            faults.append("use_dynamic_shifting needs base_shift and max_shift")
        if self.use_dynamic_shifting and self.max_image_seq_len == self.base_image_seq_len:
            faults.append(f"base_image_seq_len and max_image_seq_len are both {self.base_image_seq_len}")
        if self.shift_terminal and not 0.0 < self.shift_terminal < 1.0:
            faults.append(f"shift_terminal={self.shift_terminal} is outside (0, 1)")
        if self.shift <= 0.0 or self.num_train_timesteps < 1:
            faults.append(f"shift={self.shift} and num_train_timesteps={self.num_train_timesteps} must be positive")
        if faults:
            raise ValueError("scheduler config: " + "; ".join(faults))

    @classmethod
    def from_json(cls, path: str | Path) -> SchedulerConfig:
        """Reads a scheduler_config.json (or the folder that holds it).

        Raises ValueError for another scheduler class or a key this class does not know, FileNotFoundError if absent.
        """
        file = Path(path)
        file = file / "scheduler_config.json" if file.is_dir() else file
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        class_name = content.get("_class_name", SCHEDULER_CLASS)
        if class_name != SCHEDULER_CLASS:
            raise ValueError(f"{file}: scheduler {class_name} is not supported, only {SCHEDULER_CLASS}")
        settings = {key: value for key, value in content.items() if not key.startswith("_")}
        unknown = sorted(set(settings) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"{file}: unknown scheduler settings {unknown}: remove them, or teach {__name__} them")
        try:
            return cls(**settings)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None


def flow_match_schedule(config: SchedulerConfig, num_inference_steps: int, image_tokens: int) -> Schedule:
    """The schedule that QwenImagePipeline asks of FlowMatchEulerDiscreteScheduler, equal to it bit for bit.

    num_inference_steps: N. image_tokens: I, packed latent tokens of one image; sets the dynamic shift.

    Follows diffusers 0.40 `set_timesteps(sigmas=linspace(1, 1/N, N), mu=...)`: the shift mu in float64, the table in
    float32 in diffusers' order of operations, because engines compare their tables by bits, and a table of float64
    rounded once differs from diffusers' in the last places. Raises ValueError for N or I below 1, or a table that does
    not fall strictly.
    """
    if num_inference_steps < 1 or image_tokens < 1:
        raise ValueError(
            f"num_inference_steps={num_inference_steps} and image_tokens={image_tokens} must both be at least 1"
        )
    if config.shift_terminal and num_inference_steps == 1:
        raise ValueError("shift_terminal stretches a table of two steps or more: use num_inference_steps >= 2")
    sigmas: Any = np.linspace(1.0, 1.0 / num_inference_steps, num_inference_steps).astype(np.float32)
    if config.use_dynamic_shifting:
        mu = _dynamic_shift(config, image_tokens)
        strength = math.exp(mu) if config.time_shift_type == "exponential" else mu
        sigmas = strength / (strength + (1 / sigmas - 1))
    else:
        sigmas = config.shift * sigmas / (1 + (config.shift - 1) * sigmas)
    if config.shift_terminal:
        one_minus_sigma = 1 - sigmas
        sigmas = 1 - one_minus_sigma / (one_minus_sigma[-1] / (1 - config.shift_terminal))
    table = torch.from_numpy(sigmas).to(torch.float32)
    return Schedule(sigmas=torch.cat([table, torch.zeros(1)]), timesteps=table * config.num_train_timesteps)


def _dynamic_shift(config: SchedulerConfig, image_tokens: int) -> float:
    """mu, linear in the number of image tokens (diffusers `calculate_shift`)."""
    if config.base_shift is None or config.max_shift is None:
        raise ValueError("use_dynamic_shifting needs base_shift and max_shift")
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    return image_tokens * slope + (config.base_shift - slope * config.base_image_seq_len)
