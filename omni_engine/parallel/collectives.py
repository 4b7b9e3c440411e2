# SPDX-License-Identifier: Apache-2.0
"""Small exchanges between the ranks of one model replica, and between replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from omni_engine.parallel.groups import ParallelGroups
from omni_engine.platform import get_platform


def broadcast_from_source(tensor: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    """Give every rank of a replica its source's tensor (in place; shapes must agree beforehand)."""
    if groups.model_size > 1:
        dist.broadcast(tensor, groups.model_source, group=groups.model)
    return tensor


def broadcast_from_last_stage(tensor: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    """Give every stage of a pipeline the last stage's tensor (in place)."""
    if groups.pp_size > 1:
        dist.broadcast(tensor, groups.last_stage, group=groups.pp)
    return tensor


def broadcast_object(value: Any, groups: ParallelGroups) -> Any:
    """Give every rank of a replica its source's small object (a trusted peer of the same job)."""
    if groups.model_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, groups.model_source, group=groups.model)
    return box[0]


def broadcast_object_from_last_stage(value: Any, groups: ParallelGroups) -> Any:
    """Give every stage of a pipeline the last stage's small object."""
    if groups.pp_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, groups.last_stage, group=groups.pp)
    return box[0]


def broadcast_rows(rows: Sequence[torch.Tensor] | None, groups: ParallelGroups) -> list[torch.Tensor]:
    """Give every rank of a replica its source's list of tensors [T_i, E], which may differ in length."""
    if groups.model_size == 1:
        assert rows is not None
        return list(rows)
    shapes = broadcast_object(None if rows is None else [(tuple(row.shape), row.dtype) for row in rows], groups)
    device = get_platform().device()
    out = (
        list(rows) if rows is not None else [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
    )
    for row in out:
        dist.broadcast(row, groups.model_source, group=groups.model)
    return out


def gather_over_data(tensor: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    """Concatenate every replica's tensor [n, ...] (equal shapes) in data-parallel order."""
    if groups.dp_size == 1:
        return tensor
    out = tensor.new_empty(groups.dp_size * tensor.shape[0], *tensor.shape[1:])
    dist.all_gather_into_tensor(out, tensor.contiguous(), group=groups.dp)
    return out


def any_rank(*flags: bool) -> tuple[bool, ...]:
    """Each flag, true on every rank if it is true on any: a fault of one rank must stop all of them."""
    raised = torch.tensor([float(flag) for flag in flags], device=get_platform().device())
    dist.all_reduce(raised, op=dist.ReduceOp.MAX)
    return tuple(flag > 0 for flag in raised.tolist())
