# SPDX-License-Identifier: Apache-2.0
"""The distributed optimizer resumes as torch's AdamW goes on: the step counts are right, however the state is sharded.

Each fault is shown twice: gone with the mend, and there without it (if Megatron mends it, that half fails and the mend
can go). Loading is done in memory: saved shards are put in the place of the wanted ones, as dist_checkpointing does.
Does not cover: files and several ranks (tests/distributed/test_platform_megatron.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from omni_engine.platform import adamw_fix, get_platform

pytestmark = [
    pytest.mark.fast,
    pytest.mark.skipif(distrib_optimizer.HAVE_APEX_OR_TE, reason="a fused Adam is installed"),
]

LEARNING_RATE = 0.02
MENDED = pytest.mark.parametrize("mended", [True, False], ids=["mended", "stock"])


def _stock_distrib_optimizer() -> ModuleType:
    """A second copy of Megatron's module, prepared by the platform in all but the mend (which goes by module name)."""
    spec = importlib.util.spec_from_file_location(adamw_fix.MODULE + "_stock", distrib_optimizer.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    get_platform().patch_megatron_module(module)
    return module


@pytest.fixture
def build(single_process: object, mended: bool, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Training]:
    if not mended:
        monkeypatch.setattr(megatron_optimizer, "DistributedOptimizer", _stock_distrib_optimizer().DistributedOptimizer)
    return Training


class Training:
    """Two float32 parameters under Megatron's distributed optimizer, on gradients that depend on the step only."""

    def __init__(self) -> None:
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        self.module = torch.nn.Linear(5, 3)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, ddp, self.module)
        settings = OptimizerConfig(
            optimizer="adam", lr=LEARNING_RATE, weight_decay=0.0, clip_grad=0.0, use_distributed_optimizer=True
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        (self.inner,) = getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def step(self, number: int) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        (self.model(_input(number)) ** 2).mean().backward()
        self.model.finish_grad_sync()
        self.optimizer.step()

    def steps(self) -> list[float]:
        return [state["step"].item() for state in self.inner.optimizer.state.values()]

    def sharded_state(self, is_loading: bool, sharding: str) -> dict[str, Any]:
        model = {
            name: ShardedTensor.from_rank_offsets(name, parameter, replica_id=0)
            for name, parameter in self.module.named_parameters()
        }
        state: dict[str, Any] = self.inner.sharded_state_dict(
            model, is_loading=is_loading, metadata={"distrib_optim_sharding_type": sharding}
        )
        return state

    def load(self, saved: Any, sharding: str) -> None:
        self.inner.load_state_dict(_fill(self.sharded_state(True, sharding), saved))
        # Megatron loads the model beside the optimizer; here its parameters follow from the main ones.
        self.inner._copy_main_params_to_model_params()


def _input(number: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(number))


def _fill(wanted: Any, saved: Any) -> Any:
    """What dist_checkpointing.load gives: the saved data, or the wanted object's own where it is not persistent."""
    if isinstance(wanted, LocalNonpersistentObject):
        return wanted.unwrap()
    if isinstance(wanted, ShardedTensor):
        return saved.data.detach().clone()
    if isinstance(wanted, ShardedObject):
        return saved.data
    if isinstance(wanted, dict):
        return {key: _fill(value, saved[key]) for key, value in wanted.items()}
    if isinstance(wanted, list):
        return [_fill(value, saved[index]) for index, value in enumerate(wanted)]
    return saved


def _parameters_of_torch_adamw(steps: int) -> list[torch.Tensor]:
    module = torch.nn.Linear(5, 3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    adamw = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for number in range(steps):
        adamw.zero_grad()
        (module(_input(number)) ** 2).mean().backward()
        adamw.step()
    return list(module.parameters())


def _error(training: Training, steps: int) -> float:
    """The largest difference to torch's AdamW after `steps`, in learning rates (about one is a step's move)."""
    pairs = zip(training.module.parameters(), _parameters_of_torch_adamw(steps), strict=True)
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs) / LEARNING_RATE


def _unless(mended: bool, *errors: type[Exception]) -> AbstractContextManager[object]:
    return nullcontext() if mended else pytest.raises(errors)


@MENDED
def test_without_loading_it_is_torch_adamw(build: Callable[[], Training], mended: bool) -> None:
    training = build()
    for number in range(4):
        training.step(number)
    assert _error(training, 4) < 1e-4
    assert training.steps() == [4.0, 4.0]


@MENDED
def test_fault_1_an_optimizer_that_has_not_stepped_has_a_state(build: Callable[[], Training], mended: bool) -> None:
    training = build()
    with _unless(mended, AssertionError):
        state = training.inner.state_dict()
    if mended:
        assert {group["step"] for group in state["optimizer"]["param_groups"]} == {0.0}
        for number in range(3):  # and having been asked for it changes nothing
            training.step(number)
        assert _error(training, 3) < 1e-4


@MENDED
def test_fault_2_a_fully_reshardable_state_loads(build: Callable[[], Training], mended: bool) -> None:
    saved, resumed = build(), build()
    for number in range(2):
        saved.step(number)
        resumed.step(number + 7)  # a state of its own, so that fault 1 is not in the way
    with _unless(mended, KeyError):
        resumed.load(saved.sharded_state(False, "fully_reshardable"), "fully_reshardable")
    if mended:
        assert _error(resumed, 2) < 1e-4
        assert resumed.steps() == [2.0, 2.0]


@MENDED
def test_fault_3_parameters_do_not_share_a_step_count(build: Callable[[], Training], mended: bool) -> None:
    training = build()
    for number in range(2):
        training.step(number)
    training.inner.load_state_dict(training.inner.state_dict())
    for number in range(2, 4):
        training.step(number)
    assert (training.steps() == [4.0, 4.0]) == mended
    assert (_error(training, 4) < 1e-4) == mended


@MENDED
def test_fault_4_a_dp_reshardable_state_keeps_its_step_count(build: Callable[[], Training], mended: bool) -> None:
    saved, resumed = build(), build()
    for number in range(3):
        saved.step(number)
    resumed.step(7)  # step count 1, which must not be what is left
    with torch.no_grad():  # without it the stock optimizer does not even get to the fault
        resumed.load(saved.sharded_state(False, "dp_reshardable"), "dp_reshardable")
    assert (resumed.steps() == [3.0, 3.0]) == mended
    for number in range(3, 5):
        resumed.step(number)
    assert (_error(resumed, 5) < 1e-4) == mended


@MENDED
def test_fault_4_a_float32_parameter_is_loaded_in_place(build: Callable[[], Training], mended: bool) -> None:
    saved, resumed = build(), build()
    saved.step(0)
    resumed.step(7)
    with _unless(mended, RuntimeError):
        resumed.load(saved.sharded_state(False, "dp_reshardable"), "dp_reshardable")


@pytest.mark.parametrize("mended", [True])
@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
def test_a_fresh_optimizer_resumes_as_if_unbroken(build: Callable[[], Training], sharding: str) -> None:
    saved, resumed = build(), build()
    for number in range(3):
        saved.step(number)
    resumed.load(saved.sharded_state(False, sharding), sharding)
    for number in range(3, 6):
        saved.step(number)
        resumed.step(number)
    for ours, theirs in zip(resumed.module.parameters(), saved.module.parameters(), strict=True):
        assert ours.equal(theirs)
    assert _error(resumed, 6) < 1e-4


def test_a_fused_adam_is_left_alone() -> None:
    class Untouched:
        pass

    module = ModuleType("fused")
    vars(module).update(HAVE_APEX_OR_TE=True, DistributedOptimizer=Untouched)
    adamw_fix.mend(module)
    assert not {"state_dict", "load_state_dict"} & set(vars(Untouched))
