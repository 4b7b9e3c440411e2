# SPDX-License-Identifier: Apache-2.0
"""Process groups as one object: the only state the engine shares between its parts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from omni_engine.platform import get_platform


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups of one policy and this process's place in them.

    An *axis* is a parallel axis: tensor (tp), pipeline (pp), data (dp). The `model` group is tp x pp: its members hold
    one copy of the policy and work on the same samples.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    model: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def is_model_source(self) -> bool:
        """True on the one rank of a model replica that encodes prompts, decodes pictures and asks for rewards."""
        return self.tp_rank == 0 and self.pp_rank == 0

    @property
    def model_source(self) -> int:
        """Global rank of this replica's source, for broadcasts over `model`."""
        return dist.get_process_group_ranks(self.model)[0]

    @property
    def last_stage(self) -> int:
        """Global rank that holds the last stage in this rank's pipeline, for broadcasts over `pp`."""
        return dist.get_process_group_ranks(self.pp)[-1]

    def describe(self) -> str:
        """The layout in words, such as `TP2 x PP1 x DP4`."""
        return f"TP{self.tp_size} x PP{self.pp_size} x DP{self.dp_size}"


def initialize(
    tensor_model_parallel_size: int, pipeline_model_parallel_size: int, seed: int, timeout_minutes: float
) -> ParallelGroups:
    """Join the job and build the groups; the world must be a multiple of tp x pp (argument validation sees to it)."""
    if not dist.is_initialized():
        dist.init_process_group(get_platform().dist_backend, timeout=timedelta(minutes=timeout_minutes))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        distributed_timeout_minutes=max(1, int(timeout_minutes)),
    )
    model_parallel_cuda_manual_seed(seed)
    return current_groups()


def current_groups() -> ParallelGroups:
    """The groups that `initialize` built, read back from Megatron's parallel state."""
    return ParallelGroups(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        model=parallel_state.get_model_parallel_group(),
    )


def destroy() -> None:
    """Leave the job. Safe to call twice."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
