# SPDX-License-Identifier: Apache-2.0
"""States of the random generators of a process, in a form that JSON holds.

The engine's own draws are functions of (seed, sample, step) and need no state. These are the generators that other
code in the process may draw from: Python's, numpy's, torch's on host and device, and Megatron's tensor-parallel ones.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from omni_engine.platform import get_platform


def generator_states() -> dict[str, Any]:
    """The states of this process's generators."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
        "device": _text(_device().get_rng_state()),
        "megatron": {name: _text(state) for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def set_generator_states(states: dict[str, Any]) -> None:
    """Put generators where they stood.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: the states are not of that form.
    """
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_state(states["torch"]))
    _device().set_rng_state(_state(states["device"]))
    get_cuda_rng_tracker().set_states({name: _state(text) for name, text in states["megatron"].items()})


def _device() -> Any:
    """The module that holds the device's generator: torch itself where the device is the host."""
    module = torch.get_device_module(get_platform().device())
    return module if hasattr(module, "get_rng_state") else torch


def _text(state: torch.Tensor) -> str:
    return bytes(state.cpu().tolist()).hex()


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
