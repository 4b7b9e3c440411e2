# SPDX-License-Identifier: Apache-2.0
"""Ascend NPUs, by torch_npu and MindSpeed.

MindSpeed makes Megatron-core run on an NPU by patching both, in place, when `mindspeed.megatron_adaptor` is imported;
torch_npu's `transfer_to_npu` makes every `torch.cuda` call of the process one of `torch.npu`. Both are imported here
right before Megatron-core. MindSpeed reads flags of its own from the command line and leaves all others alone.
Written from the source of MindSpeed core_r0.16.0 (megatron-core 0.16, torch 2.7.1, Python 3.10); not run on a device.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from omni_engine.platform.attention_kernels import AttentionKernel, NpuFusionKernel
from omni_engine.platform.base import ParallelChoices, Platform, PlatformError, nvidia_only, too_few_devices
from omni_engine.platform.peak import ascend_peak

_ADAPTOR = "mindspeed.megatron_adaptor"
_MINDSPEED_MISSING = (
    "MindSpeed, which makes Megatron-core run on NPUs, is not installed: install the branch of "
    "https://gitcode.com/Ascend/MindSpeed that is made for your megatron-core (core_r0.16.0 for 0.16)"
)


class NpuPlatform(Platform):
    name = "npu"
    device_type = "npu"
    dist_backend = "hccl"

    def is_available(self) -> bool:
        return importlib.util.find_spec("torch_npu") is not None and bool(_npu().is_available())

    def why_unavailable(self) -> str:
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed; install the release of it that is made for this torch and CANN"
        return "torch_npu sees no device; check npu-smi info, ASCEND_RT_VISIBLE_DEVICES and CANN's set_env.sh"

    def device(self) -> torch.device:
        return torch.device("npu", _npu().current_device())

    def set_device(self, local_rank: int) -> None:
        _npu().set_device(local_rank)

    def attention_kernel(self) -> AttentionKernel:
        return NpuFusionKernel()

    def synchronize(self) -> None:
        _npu().synchronize()

    def empty_cache(self) -> None:
        _npu().empty_cache()

    def device_peak_bytes(self) -> int:
        return int(_npu().max_memory_allocated())

    def reset_peak(self) -> None:
        _npu().reset_peak_memory_stats()

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        return ascend_peak(str(_npu().get_device_name()), dtype)

    def validate(self, settings: ParallelChoices) -> list[str]:
        faults = super().validate(settings) + nvidia_only(self.name, settings)
        faults += too_few_devices("NPU", int(_npu().device_count()))
        if importlib.util.find_spec("mindspeed") is None:
            faults.append(_MINDSPEED_MISSING)
        return faults

    def prepare_megatron(self) -> None:
        if importlib.util.find_spec("mindspeed") is None:
            raise PlatformError(_MINDSPEED_MISSING)
        for name in ("torch_npu", "torch_npu.contrib.transfer_to_npu", _ADAPTOR):
            importlib.import_module(name)

    def adopt_loaded_megatron(self, modules: Sequence[ModuleType]) -> None:
        if _ADAPTOR not in sys.modules:
            raise PlatformError(
                "megatron.core was imported before omni_engine, without MindSpeed's patches: "
                "move `import omni_engine` above the first import of megatron.core"
            )
        super().adopt_loaded_megatron(modules)


def _npu() -> Any:
    """`torch.npu`, which is there once torch_npu is imported and which torch's type stubs do not know.

    Raises:
        PlatformError: torch_npu is installed but cannot be imported.
    """
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise PlatformError(
            f"torch_npu is installed but cannot be imported ({error}): source CANN's set_env.sh, check that it is "
            "made for this torch, or set OMNI_PLATFORM=cpu to run without the NPU"
        ) from error
    return vars(torch)["npu"]
