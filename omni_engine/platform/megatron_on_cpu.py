# SPDX-License-Identifier: Apache-2.0
"""Makes Megatron-core run on a CPU: it is given a view of torch in which the device it was written for is the CPU.

All that Megatron does is kept: sharded layers, pipeline schedules, DDP, the distributed optimizer, checkpoints. Only
what a CPU has no use for is left out: kernels fused by a compiler. Modules of `megatron.core`, and calls from them,
are answered differently; the rest of the process sees torch as it is (`test_scope.py`).

Why: Megatron-core has no CPU support. Written for 0.16 to 0.19, which are alike in this.
No longer needed when: `test_stock_megatron_still_needs_every_patch` fails; it tries each of these on Megatron as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from omni_engine.platform.base import PlatformError
from omni_engine.platform.torch_view import TorchView

_SCOPE = "megatron.core."


def prepare() -> None:
    """Before Megatron is imported: the methods that it calls on objects of torch's own.

    The optimizers compare `param.type()` with 'torch.cuda.FloatTensor' and the like and refuse any other tensor;
    `.cuda()` and `.record_stream()` are called where a tensor is sent or kept.
    """
    _answer_megatron(torch.Tensor, "type", _device_type)
    _answer_megatron(torch.Tensor, "cuda", _stay)
    _answer_megatron(torch.nn.Module, "cuda", _stay)
    _answer_megatron(torch.Tensor, "record_stream", _stay)


def patch(module: ModuleType) -> None:
    """After a module of Megatron ran: the view of torch, and the patch of this very module if there is one."""
    for name, value in list(vars(module).items()):
        if value is torch:
            setattr(module, name, _view())
    mend = _MODULE_PATCHES.get(module.__name__.removeprefix(_SCOPE))
    if mend is not None:
        mend(module)


@functools.cache
def _view() -> TorchView:
    """The view that the modules share."""
    return TorchView()


def _answer_megatron(owner: type, name: str, answer: Callable[..., Any]) -> None:
    """Make `owner.name` call `answer(original, self, *args)` if its caller is a function of megatron.core.

    The caller is told by its frame: one look, some hundred nanoseconds, on methods that no inner loop calls.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith(_SCOPE):
            return answer(original, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(owner, name, method)


def _device_type(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    answer = original(tensor, *args, **kwargs)  # a string, or a tensor if a type was given
    return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer


def _stay(original: Callable[..., Any], thing: Any, *args: Any, **kwargs: Any) -> Any:
    return thing


def _turn_off_compile(module: ModuleType) -> None:
    """`jit_fuser` is torch.compile, which on a CPU needs a C++ compiler at run time and takes minutes for no gain."""
    module.disable_jit_fuser()
    _replace(module, "enable_jit_fuser", module.disable_jit_fuser)


def _use_host_generator(module: ModuleType) -> None:
    """The generator of the device is the host's, where Megatron expects two.

    `_get_cuda_rng_state` and `_set_cuda_rng_state` reach for CUDA's default generator. And `fork()` warns if the host's
    generator moved while the device's was in use; here they move together, so this module is shown a host generator
    that never moves.
    """

    def get_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    _replace(module, "_get_cuda_rng_state", get_state)
    _replace(module, "_set_cuda_rng_state", set_state)
    _replace(module, "torch", TorchView(host_generator=False))


def _mend_moe_utils(module: ModuleType) -> None:
    """Two faults of the mixture-of-experts layers without TransformerEngine and without a GPU.

    `te_general_gemm` is undefined without TransformerEngine (0.16; mended in 0.19). `maybe_move_tensor_to_cpu` hands a
    tensor that is on the CPU back as it is, where the all-to-all needs the numpy array that it asked for.
    """

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    _replace(module, "maybe_move_tensor_to_cpu", maybe_move_tensor_to_cpu)
    if not hasattr(module, "te_general_gemm"):
        vars(module)["te_general_gemm"] = None


def _replace(module: ModuleType, name: str, value: object) -> None:
    if not hasattr(module, name):
        raise PlatformError(
            f"{module.__name__} has no {name!r}, which has to be replaced on a CPU: this megatron-core is not one that "
            "omni_engine knows (0.16 to 0.19); install megatron-core 0.16.1"
        )
    setattr(module, name, value)


_MODULE_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "jit": _turn_off_compile,
    "tensor_parallel.random": _use_host_generator,
    "transformer.moe.moe_utils": _mend_moe_utils,
}
