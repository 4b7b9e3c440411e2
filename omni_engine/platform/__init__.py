# SPDX-License-Identifier: Apache-2.0
"""The device the engine runs on: cpu, cuda or npu. No other folder names a device or a communication backend.

`get_platform()` is the face of this folder. The platform is chosen once a process: by name (`select_platform`), else by
the environment variable OMNI_PLATFORM, else it is the first of npu, cuda and cpu that is present. It must be chosen
before `megatron.core` is first imported, because that import is what the platform prepares (`megatron_hook`).
"""

from __future__ import annotations

import importlib
import os

from omni_engine.platform.base import Platform, PlatformError

__all__ = ["PLATFORM_NAMES", "Platform", "PlatformError", "get_platform", "select_platform"]

# In the order in which "auto" looks for them.
_CLASSES = {"npu": "NpuPlatform", "cuda": "CudaPlatform", "cpu": "CpuPlatform"}
PLATFORM_NAMES = tuple(_CLASSES)

_selected: Platform | None = None


def get_platform() -> Platform:
    """The platform of this process, selected at the first call."""
    return _selected if _selected is not None else select_platform()


def select_platform(name: str = "auto") -> Platform:
    """Select the platform of this process: one of PLATFORM_NAMES, or "auto" for the one already selected, else the one
    that OMNI_PLATFORM names, else the first that is present.

    Raises:
        PlatformError: the name is unknown, the platform cannot run here, or another one is in use already.
    """
    global _selected
    if name == "auto" and _selected is None:
        name = os.environ.get("OMNI_PLATFORM", "auto")
    if name != "auto" and name not in _CLASSES:
        raise PlatformError(f"unknown platform {name!r}: choose auto, {', '.join(PLATFORM_NAMES)}")
    if _selected is None:
        _selected = _first_present() if name == "auto" else _require(name)
    elif name not in ("auto", _selected.name):
        raise PlatformError(
            f"platform {name!r} was asked for after {_selected.name!r} had been selected: set OMNI_PLATFORM={name}, "
            f"or call select_platform({name!r}) before megatron.core is imported or get_platform() called"
        )
    return _selected


def _build(name: str) -> Platform:
    platform: Platform = getattr(importlib.import_module(f"{__name__}.{name}"), _CLASSES[name])()
    return platform


def _require(name: str) -> Platform:
    platform = _build(name)
    if not platform.is_available():
        raise PlatformError(f"platform {name!r} cannot be used here: {platform.why_unavailable()}")
    return platform


def _first_present() -> Platform:
    # The last one, cpu, is always available.
    return next(platform for platform in map(_build, PLATFORM_NAMES) if platform.is_available())
