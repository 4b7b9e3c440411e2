# SPDX-License-Identifier: Apache-2.0
"""Invariant: a device's peak is that of its data sheet, by whole words of its name; an unknown one has none, and that
of a CPU is measured once.

Names are those that drivers report. Does not cover the figures themselves, nor devices at work.
"""

from __future__ import annotations

import pytest
import torch

from omni_engine.platform import cpu, peak
from omni_engine.platform.cpu import CpuPlatform

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA H2000", None),
    ],
)
def test_gpus_by_name(name: str, teraflops: float | None) -> None:
    expected = None if teraflops is None else teraflops * 1e12
    assert peak.nvidia_peak(name, torch.bfloat16) == peak.nvidia_peak(name, torch.float16) == expected
    assert peak.nvidia_peak(name, torch.int64) is None


def test_float32_uses_tf32_where_torch_may() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert peak.nvidia_peak("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12
        torch.set_float32_matmul_precision("high")
        assert peak.nvidia_peak("NVIDIA A100-SXM4-80GB", torch.float32) == 156e12
    finally:
        torch.set_float32_matmul_precision(before)


def test_npus_by_name() -> None:
    assert peak.ascend_peak("Ascend910B2", torch.bfloat16) == peak.ascend_peak("Ascend910_9392", torch.bfloat16)
    assert peak.ascend_peak("Ascend910B4", torch.bfloat16) == 245.76e12
    assert peak.ascend_peak("Ascend310P3", torch.bfloat16) is None
    assert peak.ascend_peak("Ascend910B2", torch.float32) is None


def test_a_cpu_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[torch.dtype] = []

    def measure(dtype: torch.dtype) -> float:
        measured.append(dtype)
        return peak.measured_peak(dtype, size=64, seconds=0.0)

    monkeypatch.setattr(cpu, "measured_peak", measure)
    cpu._measured_once.cache_clear()
    try:
        first = CpuPlatform().peak_flops(torch.float32)
        assert CpuPlatform().peak_flops(torch.float32) == first and measured == [torch.float32]
        assert first is not None and 1e7 < first < 1e14
    finally:
        cpu._measured_once.cache_clear()
