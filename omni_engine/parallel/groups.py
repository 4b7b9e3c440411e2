# SPDX-License-Identifier: Apache-2.0
"""Process groups as one object: the only state the engine shares between its parts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from omni_engine.arguments import ParallelSettings
from omni_engine.platform import get_platform


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups of one policy and this process's place in them.

    An *axis* is a parallel axis: tensor (tp), context (cp), pipeline (pp), data (dp). The context axis shards the
    tokens and is ulysses x ring, Ulysses ranks being neighbours. The `model` group is tp x cp x pp: its members hold
    one copy of the policy and work on the same samples. `dp` never includes cp; `dp_cp` are the ranks that hold the
    same weights.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    cp_rank: int
    cp_size: int
    ulysses_size: int
    ring_size: int
    pp_rank: int
    pp_size: int
    vpp_size: int
    dp_rank: int
    dp_size: int
    dp_cp_rank: int
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    ulysses: dist.ProcessGroup
    ring: dist.ProcessGroup
    tp_cp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    model: dist.ProcessGroup

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def model_size(self) -> int:
        """Ranks of one replica."""
        return self.tp_size * self.cp_size * self.pp_size

    @property
    def is_model_source(self) -> bool:
        """True on the one rank of a model replica that encodes prompts, decodes pictures and asks for rewards."""
        return self.tp_rank == 0 and self.cp_rank == 0 and self.pp_rank == 0

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
        parts = [f"TP{self.tp_size}"]
        if self.cp_size > 1:
            parts.append(f"USP{self.ulysses_size}x{self.ring_size}")
        parts.append(f"PP{self.pp_size}" if self.vpp_size == 1 else f"PP{self.pp_size}xVPP{self.vpp_size}")
        return " x ".join([*parts, f"DP{self.dp_size}"])


def initialize(parallel: ParallelSettings, seed: int) -> ParallelGroups:
    """Join the job and build the groups; the world must be a multiple of the layout (`validate` sees to it)."""
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    if not dist.is_initialized():
        dist.init_process_group(get_platform().dist_backend, timeout=timeout)
    virtual = parallel.num_virtual_stages_per_pipeline_rank
    context = parallel.context_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=context,
        hierarchical_context_parallel_sizes=[parallel.ulysses_degree, parallel.ring_degree] if context > 1 else None,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
    )
    model_parallel_cuda_manual_seed(seed)
    return _read_groups(timeout)


def _read_groups(timeout: timedelta) -> ParallelGroups:
    """The groups that Megatron built, and the one it does not have: tp x cp x pp."""
    cp = parallel_state.get_context_parallel_group()
    ulysses, ring = parallel_state.get_hierarchical_context_parallel_groups() if cp.size() > 1 else (cp, cp)
    return ParallelGroups(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=cp.size(),
        ulysses_size=ulysses.size(),
        ring_size=ring.size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        vpp_size=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        dp_cp_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=cp,
        ulysses=ulysses,
        ring=ring,
        tp_cp=parallel_state.get_tensor_and_context_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        model=_replica_group(timeout),
    )


def _replica_group(timeout: timedelta) -> dist.ProcessGroup:
    """Ranks that work on the same samples. Every rank builds the groups of all replicas, as torch wants it."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return parallel_state.get_model_parallel_group()
    replicas: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(replicas, parallel_state.get_data_parallel_rank())
    groups = [
        parallel_state.create_group([rank for rank, owner in enumerate(replicas) if owner == replica], timeout=timeout)
        for replica in range(parallel_state.get_data_parallel_world_size())
    ]
    return groups[parallel_state.get_data_parallel_rank()]


def leave_layout() -> None:
    """End the groups, so that `initialize` can build others in the same job. A collective."""
    groups = parallel_state._global_process_group_list or ()
    dist.barrier()
    _forget_layout()
    # Megatron forgets most of them without ending them, and each has threads and connections of its own.
    alive = dist.distributed_c10d._world.pg_map
    for group in [group for group in groups if group in alive]:
        dist.destroy_process_group(group)


def _forget_layout() -> None:
    parallel_state.destroy_model_parallel()
    # Megatron forgets to forget these (seen in 0.16.1).
    parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = None


def destroy() -> None:
    """Leave the job. Safe to call twice."""
    if dist.is_initialized():
        _forget_layout()
        dist.destroy_process_group()
