# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs. Megatron-core is made for them, so nothing is patched but the AdamW faults of `adamw_fix`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from omni_engine.platform.attention_kernels import AttentionKernel, CudaFlashKernel
from omni_engine.platform.base import ParallelChoices, Platform, too_few_devices
from omni_engine.platform.peak import nvidia_peak


class CudaPlatform(Platform):
    name = "cuda"
    device_type = "cuda"
    dist_backend = "nccl"

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def why_unavailable(self) -> str:
        if torch.version.cuda is None:
            return f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
        return "torch sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def set_device(self, local_rank: int) -> None:
        torch.cuda.set_device(local_rank)

    def attention_kernel(self) -> AttentionKernel:
        return CudaFlashKernel()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def device_peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        return nvidia_peak(torch.cuda.get_device_name(), dtype)

    @contextmanager
    def named_range(self, name: str) -> Iterator[None]:
        # For torch's profiler and, by NVTX, for Nsight Systems.
        with super().named_range(name), torch.cuda.nvtx.range(name):
            yield

    def profiler_activities(self) -> list[Any]:
        return [*super().profiler_activities(), torch.profiler.ProfilerActivity.CUDA]

    def validate(self, settings: ParallelChoices) -> list[str]:
        faults = super().validate(settings) + too_few_devices("CUDA", torch.cuda.device_count())
        if not torch.distributed.is_nccl_available():
            faults.append("torch was built without NCCL, by which GPUs communicate; install a build that has it")
        return faults
