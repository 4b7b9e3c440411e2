# SPDX-License-Identifier: Apache-2.0
"""Invariant: an error that explains itself is told without a traceback, and no other is. Whole runs that fail are in
tests/distributed/test_bad_runs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import omni_engine  # noqa: F401 - prepares megatron.core's import
from omni_engine.checkpoint import CheckpointError
from omni_engine.data import load_prompts
from omni_engine.pretrain_flowgrpo import _failure
from omni_engine.training.optimizer import TrainingError

pytestmark = pytest.mark.fast


def told(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return _failure(error, rank=3)
    raise AssertionError("it did not fail")


def raises(error: Exception) -> Callable[[], object]:
    def work() -> object:
        raise error

    return work


def test_errors_of_ours_are_told_alone() -> None:
    for kind in (CheckpointError, TrainingError):
        assert told(raises(kind("the disk is full"))) == "error on rank 3: the disk is full"


def test_python_errors_of_ours_are_told_alone_and_those_of_others_with_their_traceback(tmp_path: Path) -> None:
    assert told(lambda: load_prompts(tmp_path / "absent.txt")).startswith(f"error on rank 3: {tmp_path}/absent.txt: no")
    for work in (lambda: int("seven"), lambda: torch.ones(2) @ torch.ones(3), raises(RuntimeError("odd"))):
        text = told(work)
        assert text.startswith("Traceback (most recent call last)") and "\nerror on rank 3: " in text


def test_a_lost_peer_is_told_as_such() -> None:
    text = told(raises(torch.distributed.DistNetworkError("Connection reset by peer")))
    assert text.startswith("rank 3 lost another process of the run, which has ended or does not answer (Connection")
