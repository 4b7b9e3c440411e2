# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of a device. This module does not import torch until a method needs it."""

from __future__ import annotations

import os
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from omni_engine.platform.attention_kernels import AttentionKernel


class PlatformError(RuntimeError):
    """The platform cannot be used as asked; the message says why and what to do."""


class ParallelChoices(Protocol):
    """The part of the parallel settings that a platform may refuse."""

    @property
    def platform(self) -> str: ...
    @property
    def cpu_threads(self) -> int: ...
    @property
    def optimizer_cpu_offload(self) -> bool: ...
    @property
    def transformer_impl(self) -> str: ...
    @property
    def gradient_accumulation_fusion(self) -> bool: ...


class Platform(ABC):
    """One kind of device. A process has one device; `set_device` is called once, before any tensor is made on it."""

    name: ClassVar[str]
    device_type: ClassVar[str]
    dist_backend: ClassVar[str]

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this process can use the platform."""

    @abstractmethod
    def why_unavailable(self) -> str:
        """The reason and the remedy, where `is_available()` is False."""

    @abstractmethod
    def device(self) -> torch.device:
        """The device of this process."""

    @abstractmethod
    def set_device(self, local_rank: int) -> None:
        """Take the device of this process: number `local_rank` of the node."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all its work."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Return the allocator's unused memory to the device."""

    @abstractmethod
    def device_peak_bytes(self) -> int:
        """Peak memory of the device held by this process, in bytes, since `reset_peak()`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new measurement of `device_peak_bytes()`."""

    def share_cores(self, threads: int, processes: int) -> None:  # noqa: B027 (a default, not an oversight)
        """Use `threads` host threads for computing (0: an equal part of the cores for each of the node's `processes`).

        Only a platform that computes on the host has something to share.
        """

    def seed(self, seed: int) -> None:
        """Seed Python, numpy and torch, the device's generator included.

        The tensor-parallel generators of Megatron are not touched: they need the process groups.

        Raises:
            ValueError: `seed` is negative or does not fit 63 bits.
        """
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed {seed} is out of range: give 0 <= seed < 2**63")
        import numpy
        import torch

        random.seed(seed)
        numpy.random.seed(seed % 2**32)  # the legacy generator takes 32 bits
        torch.manual_seed(seed)  # seeds the host's generator and those of every device

    def host_peak_bytes(self) -> int:
        """Peak resident memory of this process on the host, in bytes, over its whole life."""
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB

    def attention_kernel(self) -> AttentionKernel:
        """The kernel of a ring attention step on this device."""
        from omni_engine.platform.attention_kernels import MathKernel

        return MathKernel()

    def named_range(self, name: str) -> AbstractContextManager[Any]:
        """A range of this name in a profiler's trace; entered and left by the same thread."""
        import torch

        return torch.profiler.record_function(name)

    def profiler_activities(self) -> list[Any]:
        """What torch's profiler records on this device."""
        import torch

        return [torch.profiler.ProfilerActivity.CPU]

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """FLOP/s of dense matrix products of this process's device in `dtype`; None where it is not known."""
        return None

    def is_lost_peer(self, error: BaseException) -> bool:
        """Whether a collective failed because another process is gone or does not answer."""
        import torch

        return isinstance(error, torch.distributed.DistError)

    def validate(self, settings: ParallelChoices) -> list[str]:
        """The faults of the parallel settings on this platform, each with its remedy; empty if there are none."""
        if settings.platform in ("auto", self.name):
            return []
        return [
            f"--platform {settings.platform} was asked for, but this process runs on {self.name}: "
            f"unset OMNI_PLATFORM or set it to {settings.platform}"
        ]

    def prepare_megatron(self) -> None:  # noqa: B027 (a default, not an oversight)
        """Called once, right before `megatron.core` is first imported."""

    def patch_megatron_module(self, module: ModuleType) -> None:
        """Called for each `megatron.core` module right after it ran. An override calls this one too."""
        from omni_engine.platform import adamw_fix

        if module.__name__ == adamw_fix.MODULE:
            adamw_fix.mend(module)

    def adopt_loaded_megatron(self, modules: Sequence[ModuleType]) -> None:
        """Called instead of `prepare_megatron` if `megatron.core` was imported before omni_engine.

        Raises:
            PlatformError: the platform has to come first.
        """
        for module in modules:
            self.patch_megatron_module(module)


def nvidia_only(name: str, settings: ParallelChoices) -> list[str]:
    """The faults of settings that only NVIDIA's kernels can keep, on another platform."""
    why = f"needs an NVIDIA GPU, and this process runs on {name}"
    faults = []
    if settings.transformer_impl == "transformer_engine":
        faults.append(f"--transformer-impl transformer_engine {why}: use --transformer-impl local")
    if settings.gradient_accumulation_fusion:
        faults.append(f"--gradient-accumulation-fusion {why}: leave it out")
    return faults


def processes_on_node() -> int:
    """Processes of this job on this node, as torchrun says; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def too_few_devices(name: str, count: int) -> list[str]:
    """The fault of a launch with more processes on this node than it has devices."""
    if processes_on_node() <= count:
        return []
    return [
        f"{processes_on_node()} processes were started on this node, which shows {count} {name} device(s): "
        f"lower --nproc-per-node to {count} or make more devices visible"
    ]
