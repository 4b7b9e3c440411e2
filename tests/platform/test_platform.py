# SPDX-License-Identifier: Apache-2.0
"""One platform a process, chosen by name or found, and a clear refusal of what cannot be; its seeds and figures.

Does not cover: cuda and npu at work, which need their devices (the cuda test runs where there is one).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy
import pytest
import torch

from omni_engine import platform as platforms
from omni_engine.platform import Platform, PlatformError, get_platform, select_platform
from omni_engine.platform.cpu import CpuPlatform
from omni_engine.platform.cuda import CudaPlatform
from omni_engine.platform.npu import NpuPlatform

pytestmark = pytest.mark.fast


@dataclass
class _Choices:
    platform: str = "auto"
    cpu_threads: int = 0
    optimizer_cpu_offload: bool = False
    transformer_impl: str = "local"
    gradient_accumulation_fusion: bool = False


@pytest.fixture
def unselected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "_selected", None)
    monkeypatch.delenv("OMNI_PLATFORM", raising=False)


def test_the_platform_is_selected_once(unselected: None) -> None:
    platform = select_platform("cpu")
    assert get_platform() is platform is select_platform("cpu") is select_platform("auto")
    with pytest.raises(PlatformError, match=r"'cuda' was asked for after 'cpu'.*OMNI_PLATFORM=cuda"):
        select_platform("cuda")


def test_the_environment_names_the_platform(unselected: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaPlatform, "is_available", lambda self: True)
    monkeypatch.setattr(NpuPlatform, "is_available", lambda self: True)
    monkeypatch.setenv("OMNI_PLATFORM", "cpu")
    assert select_platform("auto").name == "cpu"
    monkeypatch.setattr(platforms, "_selected", None)
    assert get_platform().name == "cpu"
    monkeypatch.setattr(platforms, "_selected", None)
    assert select_platform("cuda").name == "cuda"  # what is asked for by name goes before


def test_the_first_present_platform_is_found(unselected: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NpuPlatform, "is_available", lambda self: False)
    monkeypatch.setattr(CudaPlatform, "is_available", lambda self: True)
    assert get_platform().name == "cuda"


def test_an_unknown_name_is_refused(unselected: None) -> None:
    with pytest.raises(PlatformError, match="unknown platform 'tpu': choose auto, npu, cuda, cpu"):
        select_platform("tpu")


@pytest.mark.parametrize("name", ["cuda", "npu"])
def test_an_absent_platform_is_refused_with_the_reason(unselected: None, name: str) -> None:
    if {"cuda": CudaPlatform, "npu": NpuPlatform}[name]().is_available():
        pytest.skip(f"{name} is present")
    with pytest.raises(PlatformError, match=f"platform '{name}' cannot be used here: .*(install|check)"):
        select_platform(name)


def test_faults_name_the_flag_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CpuPlatform().validate(_Choices()) == []
    assert CpuPlatform().validate(_Choices(platform="cpu")) == []
    faults = CpuPlatform().validate(_Choices(platform="cuda", cpu_threads=100_000))
    assert len(faults) == 2
    assert "--platform cuda" in faults[0] and "OMNI_PLATFORM" in faults[0]
    assert "--cpu-threads 100000" in faults[1] and "lower it" in faults[1]

    choices = _Choices(
        optimizer_cpu_offload=True, transformer_impl="transformer_engine", gradient_accumulation_fusion=True
    )
    faults = CpuPlatform().validate(choices)
    assert len(faults) == 3
    assert "--transformer-impl local" in faults[0] and "NVIDIA" in faults[0]
    assert "--gradient-accumulation-fusion" in faults[1]
    assert "--optimizer-cpu-offload" in faults[2] and "host memory" in faults[2]

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert any("8 processes" in fault and "2 CUDA" in fault for fault in CudaPlatform().validate(_Choices()))


def test_a_seed_repeats_every_generator() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), numpy.random.rand(), torch.rand(1, device=get_platform().device()).item()

    get_platform().seed(2**40 + 5)
    first = draw()
    after = draw()
    get_platform().seed(2**40 + 5)
    assert draw() == first
    assert all(a != b for a, b in zip(first, after, strict=True))
    get_platform().seed(2**40 + 6)
    assert all(a != b for a, b in zip(first, draw(), strict=True))


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        get_platform().seed(seed)


def test_cores_are_shared_among_the_processes_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr("omni_engine.platform.cpu._cores", lambda: 8)
    for threads, processes in ((0, 1), (0, 3), (0, 16), (5, 4)):
        CpuPlatform().share_cores(threads, processes)
    assert used == [8, 2, 1, 5]


def test_the_host_peak_is_in_bytes_and_follows_an_allocation() -> None:
    before = get_platform().host_peak_bytes()
    size = before  # as much again, so that the peak must move whatever it was
    block = bytearray(size)
    block[::4096] = b"\1" * len(range(0, size, 4096))
    after = get_platform().host_peak_bytes()
    assert before + size // 2 < after < before + 2 * size


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_measures_its_peak() -> None:
    platform: Platform = CudaPlatform()
    platform.set_device(0)
    platform.reset_peak()
    before = platform.device_peak_bytes()
    block = torch.zeros(2**20, device=platform.device())
    assert block.device.type == "cuda"
    assert platform.device_peak_bytes() >= before + 2**22
    platform.synchronize()
    del block
    platform.empty_cache()
