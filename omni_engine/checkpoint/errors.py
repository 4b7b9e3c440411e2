# SPDX-License-Identifier: Apache-2.0
"""The one error of this folder, and how a fault of one rank becomes an error of all."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from omni_engine.parallel.collectives import any_rank


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message says what, where and the remedy."""


@contextmanager
def on_all_ranks(trouble: str) -> Iterator[None]:
    """Run a block that may fail on some ranks; then every rank raises, and says why the failing one did.

    A collective. The block may hold collectives of its own only if they raise on every rank.

    Args:
        trouble: begins the message of faults that are not a `CheckpointError` already.

    Raises:
        CheckpointError: the block failed on a rank.
    """
    fault: BaseException | None = None
    reason = None
    try:
        yield
    # torch's CheckpointException, which it raises on every rank, is no Exception.
    except (Exception, CheckpointException) as error:
        fault, reason = error, _reason(error, trouble)
    (failed,) = any_rank(fault is not None)
    if not failed:
        return
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    # One fault that all ranks see is told once.
    distinct = {reason: rank for rank, reason in reversed(list(enumerate(reasons))) if reason is not None}
    told = "; ".join(text if len(distinct) == 1 else f"rank {rank}: {text}" for text, rank in distinct.items())
    raise CheckpointError(told) from fault


def _reason(error: BaseException, trouble: str) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, CheckpointException):
        # Told without the tracebacks that its own text is made of.
        failures = {f"{type(inner).__name__}: {inner}": rank for rank, (inner, _) in error.failures.items()}
        return f"{trouble}: " + ("; ".join(f"{text} (rank {rank})" for text, rank in failures.items()) or "failed")
    return f"{trouble}: {type(error).__name__}: {error}"


def some(names: Collection[str]) -> str:
    """A few names for a message, and how many more there are."""
    shown = ", ".join(sorted(names)[:4]) or "nothing"
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
