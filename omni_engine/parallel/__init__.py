# SPDX-License-Identifier: Apache-2.0
"""Parallelism apart from maths: process groups, sharded linear layers, the tensor between pipeline stages."""

from omni_engine.parallel.groups import ParallelGroups, current_groups, destroy, initialize
from omni_engine.parallel.linear import (
    ColumnParallelLinear,
    ModulationLinear,
    ReplicatedLinear,
    RowParallelLinear,
    mark_replicated,
)
from omni_engine.parallel.segments import Segment, pack, unpack

__all__ = [
    "ColumnParallelLinear",
    "ModulationLinear",
    "ParallelGroups",
    "ReplicatedLinear",
    "RowParallelLinear",
    "Segment",
    "current_groups",
    "destroy",
    "initialize",
    "mark_replicated",
    "pack",
    "unpack",
]
