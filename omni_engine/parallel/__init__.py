# SPDX-License-Identifier: Apache-2.0
"""Parallelism apart from maths: process groups, sharded linear layers and tokens, the tensor between
pipeline stages, attention over sharded tokens."""

from omni_engine.parallel.groups import ParallelGroups, destroy, initialize, leave_layout
from omni_engine.parallel.linear import (
    ColumnParallelLinear,
    ModulationLinear,
    ReplicatedLinear,
    RowParallelLinear,
    mark_replicated,
)
from omni_engine.parallel.pipeline import pipeline_options
from omni_engine.parallel.segments import Segment, pack, unpack
from omni_engine.parallel.sequence import TokenSharding
from omni_engine.parallel.usp import usp_attention

__all__ = [
    "ColumnParallelLinear",
    "ModulationLinear",
    "ParallelGroups",
    "ReplicatedLinear",
    "RowParallelLinear",
    "Segment",
    "TokenSharding",
    "destroy",
    "initialize",
    "leave_layout",
    "mark_replicated",
    "pack",
    "pipeline_options",
    "unpack",
    "usp_attention",
]
