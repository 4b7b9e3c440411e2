# SPDX-License-Identifier: Apache-2.0
"""The CPU, with gloo: where the tests and the quick start run. `megatron_on_cpu` is what Megatron-core needs there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch

from omni_engine.platform import megatron_on_cpu
from omni_engine.platform.attention_kernels import AttentionKernel, CpuFlashKernel
from omni_engine.platform.base import ParallelChoices, Platform, PlatformError, nvidia_only
from omni_engine.platform.peak import measured_peak


class CpuPlatform(Platform):
    name = "cpu"
    device_type = "cpu"
    dist_backend = "gloo"

    def is_available(self) -> bool:
        return True

    def why_unavailable(self) -> str:
        return ""

    def device(self) -> torch.device:
        return torch.device("cpu")

    def set_device(self, local_rank: int) -> None:
        """All processes of a node compute on the same cores."""

    def share_cores(self, threads: int, processes: int) -> None:
        torch.set_num_threads(threads if threads > 0 else max(1, _cores() // processes))

    def attention_kernel(self) -> AttentionKernel:
        return CpuFlashKernel()

    def synchronize(self) -> None:
        """The CPU has done its work when a call returns."""

    def empty_cache(self) -> None:
        """Torch keeps no cache of host memory."""

    def device_peak_bytes(self) -> int:
        return self.host_peak_bytes()

    def reset_peak(self) -> None:
        """The system keeps one peak, that of the life of the process."""

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Measured, once a process and dtype: data sheets of CPUs do not say what a host's cores give one process."""
        return _measured_once(dtype)

    def is_lost_peer(self, error: BaseException) -> bool:
        # gloo throws plain RuntimeErrors that name a file: "[.../gloo/transport/tcp/pair.cc:553] Connection closed".
        return super().is_lost_peer(error) or (isinstance(error, RuntimeError) and "gloo/transport/" in str(error))

    def validate(self, settings: ParallelChoices) -> list[str]:
        faults = super().validate(settings) + nvidia_only(self.name, settings)
        if not torch.distributed.is_gloo_available():
            faults.append(
                "torch was built without gloo, by which CPU processes communicate; install a build that has it"
            )
        if settings.optimizer_cpu_offload:
            faults.append(
                "--optimizer-cpu-offload moves the optimizer's state to host memory, where everything is already on "
                "this platform (cpu): leave it out"
            )
        if settings.cpu_threads > _cores():
            faults.append(
                f"--cpu-threads {settings.cpu_threads} is more than the {_cores()} cores this process may use: "
                "lower it, or give 0 to share the cores among the processes of the node"
            )
        return faults

    def prepare_megatron(self) -> None:
        megatron_on_cpu.prepare()

    def patch_megatron_module(self, module: ModuleType) -> None:
        super().patch_megatron_module(module)
        megatron_on_cpu.patch(module)

    def adopt_loaded_megatron(self, modules: Sequence[ModuleType]) -> None:
        # Patching late would be incomplete: what modules took from each other by name (jit_fuser) is not found again.
        raise PlatformError(
            "megatron.core was imported before omni_engine, and on a CPU it has to be prepared first: "
            "move `import omni_engine` above the first import of megatron.core"
        )


@cache
def _measured_once(dtype: torch.dtype) -> float:
    return measured_peak(dtype)


def _cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
