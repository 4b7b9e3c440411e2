# SPDX-License-Identifier: Apache-2.0
"""What `megatron.core` sees as `torch` on a CPU: torch itself, but its "cuda" device is the CPU.

`TorchView()` stands in for the name `torch` inside Megatron's modules. It answers three kinds of names itself and
leaves all others to torch: `.cuda` (a `DeviceApi`), the factories that Megatron gives `device=` to, and `.device`.
Torch itself is not changed, so outside of Megatron a CUDA call still fails as it should.

Written for megatron-core 0.16 to 0.19. No longer needed when Megatron asks for its device instead of naming it, which
`test_stock_megatron_still_needs_every_patch` notices.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")

# Every torch function that megatron-core 0.16-0.19 calls with `device=`, and their like.
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace"),
    *("ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "scalar_tensor"),
    *("tensor", "tril_indices", "triu_indices", "zeros", "zeros_like"),
)


class Stream:
    """A CPU works in order, as one stream does: waiting and synchronizing need nothing done. All streams are equal."""

    device = CPU

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Takes what torch.cuda.Stream takes."""

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = event if event is not None else Event()
        event.record()
        return event

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return hash(Stream)


class Event:
    """A point in time on the one stream."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: object = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        return (end._seconds - self._seconds) * 1e3


class DeviceApi:
    """`torch.cuda` for the CPU. A name it does not answer is the real one, which raises when it is used."""

    def __init__(self) -> None:
        self.Stream = Stream
        self.Event = Event
        self._stream = Stream()
        self.random = self
        self.default_generators = (torch.default_generator,)
        self.nvtx = SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=contextlib.nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def is_available(self) -> bool:
        return False  # so that Megatron does not look for fused kernels

    def current_device(self) -> torch.device:
        return CPU  # Megatron only hands it on to `device=`

    def device_count(self) -> int:
        return 1

    def set_device(self, device: object) -> None: ...

    def device(self, device: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: object = None) -> None: ...

    def current_stream(self, device: object = None) -> Stream:
        return self._stream

    def default_stream(self, device: object = None) -> Stream:
        return self._stream

    def set_stream(self, stream: object) -> None: ...

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_current_stream_capturing(self) -> bool:
        return False

    def empty_cache(self) -> None: ...

    def memory_allocated(self, device: object = None) -> int:
        return 0

    def max_memory_allocated(self, device: object = None) -> int:
        return 0

    def memory_reserved(self, device: object = None) -> int:
        return 0

    def max_memory_reserved(self, device: object = None) -> int:
        return 0

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return {}

    # The device's generator is the host's.
    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


def _nothing(*args: object, **kwargs: object) -> None:
    """The answer to calls that only mark or profile."""


def to_cpu(device: Any) -> Any:
    """`device` as given to torch, with the CPU in place of any "cuda" device (an index is one)."""
    if isinstance(device, int):
        return CPU
    kind = device.partition(":")[0] if isinstance(device, str) else getattr(device, "type", None)
    return CPU if kind == "cuda" else device


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """`factory` with its device mapped, and without pinned memory: there is nothing to copy to."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = to_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


class _DeviceMeta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int):  # a bare index means an accelerator, which torch then looks for
            return CPU
        return to_cpu(torch.device(*args, **kwargs))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.device)


class Device(metaclass=_DeviceMeta):
    """`torch.device` for Megatron: a type, for annotations and isinstance, whose instances are real torch devices."""


class TorchView:
    """`torch` for Megatron. Reads through to torch at each access, so that it never shows a stale name.

    Not a module: where a name is missing, a module takes three times as long to turn to `__getattr__`.
    """

    device = Device

    def __init__(self, host_generator: bool = True) -> None:
        """`host_generator=False` shows a host generator that never changes: see `megatron_on_cpu`."""
        self.__name__ = "torch"
        self.cuda = DeviceApi()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))
        if not host_generator:
            unchanging = torch.zeros(1, dtype=torch.uint8)
            self.get_rng_state = lambda: unchanging
            self.set_rng_state = _nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(torch)})
