# SPDX-License-Identifier: Apache-2.0
"""Overlap, offload, other packages' kernels and traces are refused where they cannot be had, with a remedy that works,
and pass where they can.

Does not cover what a device can do (tests/platform/test_platform.py).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shlex
from collections.abc import Callable

import pytest

from omni_engine.arguments import Settings, validate

pytestmark = pytest.mark.fast

Make = Callable[..., Settings]
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

SOUND = {
    "both overlaps": (OVERLAP + " --ddp-bucket-size 1000000", 2),
    "reduction alone": ("--overlap-grad-reduce", 1),
    "a trace": ("--profile --profile-step-start 0 --profile-step-end 1 --profile-ranks 0 1", 2),
    "no trace, whatever its steps": ("--profile-step-start 500", 1),
}
# case: (flags, processes, flags that the fault names first, what the remedy offers)
REFUSED = {
    "gather without shards": (OVERLAP.replace("--use", "--no-use"), 2, "--overlap-param-gather", "Add --use-distrib"),
    "gather alone": (OVERLAP.replace("--overlap-grad", "--no-overlap-grad"), 2, "--overlap-param-gather", "Add --over"),
    "bucket of nothing": ("--ddp-bucket-size 9", 2, "--ddp-bucket-size", "Add --overlap-grad-reduce"),
    "no transformer-engine": ("--transformer-impl transformer_engine", 1, "--transformer-impl", "pip install"),
    "no apex": ("--gradient-accumulation-fusion", 1, "--gradient-accumulation-fusion", "Build apex"),
    "a trace of nothing": ("--profile --profile-step-start 12", 1, "--profile-step-start", "an end of 13"),
    "a trace after the end": ("--profile --train-iters 5", 1, "--profile-step-start", "at most 4"),
    "a rank that is not": ("--profile --profile-ranks 0 2", 2, "--profile-ranks", "0 to 1"),
}


@pytest.mark.parametrize("case", SOUND)
def test_sound_settings_pass(settings: Make, case: str) -> None:
    flags, world_size = SOUND[case]
    assert validate(settings(*shlex.split(flags)), world_size) == []


@pytest.mark.parametrize("case", REFUSED)
def test_unsound_settings_are_refused_with_a_remedy(settings: Make, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # nothing optional is installed
    flags, world_size, named, remedy = REFUSED[case]
    (fault,) = validate(settings(*shlex.split(flags)), world_size)
    assert str(fault).startswith(named)
    assert remedy in fault.remedy


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_kernels_that_are_there_may_be_used(settings: Make, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"local": "fused_weight_gradient_mlp_cuda", "transformer_engine": "transformer_engine"}[impl]
    found = importlib.machinery.ModuleSpec(present, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == present else None)
    assert validate(settings("--gradient-accumulation-fusion", "--transformer-impl", impl), 1) == []


def test_offload_wants_shards_bf16_and_transformer_engine(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    faults = validate(settings("--optimizer-cpu-offload", "--no-bf16"), 1)
    assert len(faults) == 3
    for fault, remedy in zip(faults, ("Add --use-distributed", "Add --bf16", "pip install transf"), strict=True):
        assert str(fault).startswith("--optimizer-cpu-offload on") and remedy in str(fault)
    found = importlib.machinery.ModuleSpec("transformer_engine", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "transformer_engine" else None)
    sound = "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-distributed-optimizer --bf16"
    assert validate(settings(*sound.split()), 1) == []
