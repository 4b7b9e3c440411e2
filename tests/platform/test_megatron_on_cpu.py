# SPDX-License-Identifier: Apache-2.0
"""On a CPU Megatron-core does as on its own device: its layers, generators, recomputation and streams.

Does not cover: several processes (tests/distributed/test_platform_megatron.py), that nobody else is affected
(test_scope.py), and that the patches are still needed (test_stock_megatron.py).
"""

from __future__ import annotations

import logging
import time
import timeit
from typing import Any

import pytest
import torch
from megatron.core import jit, tensor_parallel
from megatron.core import utils as megatron_utils
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils

from omni_engine.platform import PlatformError, get_platform, megatron_on_cpu
from omni_engine.platform.torch_view import Event, Stream, TorchView, to_cpu

pytestmark = [
    pytest.mark.fast,
    pytest.mark.skipif(get_platform().name != "cpu", reason="about the CPU platform"),
]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("cuda", "cpu"),
        ("cuda:1", "cpu"),
        (0, "cpu"),
        (torch.device("cuda", 3), "cpu"),
        ("cpu", "cpu"),
        ("meta", "meta"),
        (torch.device("meta"), "meta"),
    ],
)
def test_a_device_of_megatrons_becomes_the_cpu_and_any_other_stays(given: object, expected: str) -> None:
    assert torch.device(to_cpu(given)).type == expected
    view: Any = TorchView()
    assert view.zeros(2, device=given).device.type == expected
    assert view.empty_like(torch.ones(2), device=given).device.type == expected
    assert view.device(given).type == expected


def test_the_view_is_torch_in_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    view = TorchView()
    assert view.Tensor is torch.Tensor and view.nn is torch.nn and view.float32 is torch.float32
    assert view.ones(2).equal(torch.ones(2)) and view.tensor([1], pin_memory=True).device.type == "cpu"
    assert isinstance(torch.device("cpu"), view.device) and not isinstance("cpu", view.device)
    assert {"zeros", "matmul", "cuda"} <= set(dir(view))
    monkeypatch.setattr(torch, "save", print)  # also what is changed later
    assert view.save is print
    with pytest.raises(AttributeError):
        _ = view.no_such_name


def test_streams_and_events_stand_for_one_stream_in_order() -> None:
    start = time.perf_counter()
    api = TorchView().cuda
    assert api.current_stream() == api.Stream() == api.default_stream() and isinstance(api.Stream(), Stream)
    with api.stream(api.Stream()):
        first = api.current_stream().record_event()
    time.sleep(0.005)
    second = api.Event(enable_timing=True)
    second.record()
    assert isinstance(first, Event) and second.query()
    assert 5.0 <= first.elapsed_time(second) <= (time.perf_counter() - start) * 1e3  # milliseconds
    api.nvtx.range_push("a")
    api.nvtx.range_pop()
    api.synchronize()
    assert not api.is_available() and api.current_device().type == "cpu"


def test_compiling_is_off() -> None:
    jit.enable_jit_fuser()
    assert jit.jit_fuser is jit.noop_decorator


def test_the_splits_of_an_all_to_all_become_numpy() -> None:
    assert moe_utils.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True).tolist() == [1, 2]
    assert type(moe_utils.maybe_move_tensor_to_cpu(torch.tensor([1]), as_numpy=True)).__module__ == "numpy"
    assert torch.is_tensor(moe_utils.maybe_move_tensor_to_cpu(torch.tensor([1])))
    assert moe_utils.maybe_move_tensor_to_cpu(None, as_numpy=True) is None
    assert moe_utils.te_general_gemm is None


def test_a_forked_generator_is_its_own_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tracker = megatron_random.CudaRNGStatesTracker()
    tracker.add("a", 7)
    torch.manual_seed(1)
    undisturbed = torch.rand(4)
    torch.manual_seed(1)
    with caplog.at_level(logging.WARNING), tracker.fork("a"):
        forked = [torch.rand(2), torch.rand(2)]
    assert torch.rand(4).equal(undisturbed)
    with tracker.fork("a"):
        assert not torch.rand(2).equal(forked[0])
    assert forked[0].equal(torch.rand(2, generator=torch.Generator().manual_seed(7)))
    assert not caplog.records


def test_recomputing_a_layer_draws_the_same_dropout(single_process: object) -> None:
    tensor_parallel.model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    tracker = megatron_random.get_cuda_rng_tracker()

    def layer(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            x = torch.nn.functional.dropout(x, 0.5)
        return torch.nn.functional.dropout(x * x, 0.3)

    x = torch.randn(64, requires_grad=True)
    states = torch.get_rng_state(), tracker.get_states()
    plain = layer(x)
    (expected,) = torch.autograd.grad(plain.sum(), x)
    torch.set_rng_state(states[0])
    tracker.set_states(states[1])
    recomputed = tensor_parallel.checkpoint(layer, False, x)
    torch.rand(5)  # the generator has moved on when backward recomputes
    recomputed.sum().backward()
    assert recomputed.equal(plain)
    assert x.grad is not None and x.grad.equal(expected)


@pytest.mark.parametrize("use_cpu_initialization", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sharded_linear_layer_of_one_rank_is_a_linear_layer(
    single_process: object, dtype: torch.dtype, use_cpu_initialization: bool
) -> None:
    tensor_parallel.model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    config = ModelParallelConfig(params_dtype=dtype, use_cpu_initialization=use_cpu_initialization)
    layer = tensor_parallel.ColumnParallelLinear(8, 12, config=config, init_method=torch.nn.init.xavier_normal_)
    x = torch.randn(3, 2, 8, dtype=dtype, requires_grad=True)
    y, _ = layer(x)
    y.sum().backward()
    reference = x.detach().clone().requires_grad_()
    expected = torch.nn.functional.linear(reference, layer.weight, layer.bias)
    expected.sum().backward()
    assert layer.weight.std() > 0
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, reference.grad)


def test_another_megatron_is_refused_by_name() -> None:
    module = type(torch)("megatron.core.tensor_parallel.random")
    with pytest.raises(PlatformError, match=r"random has no '_get_cuda_rng_state'.*0\.16 to 0\.19"):
        megatron_on_cpu.patch(module)


def test_the_view_and_the_caller_check_are_cheap() -> None:
    """Measured 0.2 and 0.3 of the cheapest tensor operation; the bounds allow for a busy machine."""
    tensor, view = torch.ones(4), megatron_utils.torch
    operation = min(timeit.repeat(lambda: tensor.add(1.0), number=2000, repeat=5))
    lookup = min(timeit.repeat(lambda: view.add, number=2000, repeat=5))
    kind = min(timeit.repeat(lambda: tensor.type(), number=2000, repeat=5))
    assert lookup < 3 * operation
    assert kind < 5 * operation
