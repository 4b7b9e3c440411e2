# SPDX-License-Identifier: Apache-2.0
"""Parallelism apart from maths: process groups, sharded linear layers and tokens, the tensor between
pipeline stages, attention over sharded tokens."""

from omni_engine.parallel.groups import ParallelGroups, destroy, initialize, leave_layout
from omni_engine.parallel.layer_spec import LayerSpec, layer_spec
from omni_engine.parallel.linear import ColumnParallelLinear, ModulationLinear, ReplicatedLinear, RowParallelLinear
from omni_engine.parallel.lora import LoraAdapter, without_adapters
from omni_engine.parallel.pipeline import pipeline_options
from omni_engine.parallel.segments import Segment, pack, unpack
from omni_engine.parallel.sequence import TokenSharding
from omni_engine.parallel.usp import usp_attention

__all__ = [
    "ColumnParallelLinear",
    "LayerSpec",
    "LoraAdapter",
    "ModulationLinear",
    "ParallelGroups",
    "ReplicatedLinear",
    "RowParallelLinear",
    "Segment",
    "TokenSharding",
    "destroy",
    "initialize",
    "layer_spec",
    "leave_layout",
    "pack",
    "pipeline_options",
    "unpack",
    "usp_attention",
    "without_adapters",
]
