# SPDX-License-Identifier: Apache-2.0
"""The whole tensors of a policy that is spread over the ranks of a replica, for an export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from omni_engine.models.mapping import ModelMapping, ParameterMapping
from omni_engine.parallel import ParallelGroups


@dataclass(frozen=True)
class _Held:
    """A parameter of a stage: what the first stage has to know to receive it."""

    path: str
    shape: torch.Size
    dtype: torch.dtype


def whole_tensors(
    parameters: Mapping[str, torch.nn.Parameter], mapping: ModelMapping, groups: ParallelGroups
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the parameters by its Hugging Face name, gathered one parameter at a time.

    All ranks of a replica iterate. The whole tensors, on the host, come out on its source rank, nothing elsewhere.
    """
    device = next(iter(parameters.values())).device
    own = [_Held(path, parameter.shape, parameter.dtype) for path, parameter in sorted(parameters.items())]
    stages: list[list[_Held]] = [own] * groups.pp_size
    if groups.pp_size > 1:
        dist.all_gather_object(stages, own, group=groups.pp)
    for pp_rank, held in enumerate(stages):
        for parameter in held:
            entry = mapping.entries[parameter.path]
            whole: torch.Tensor | None = None
            if pp_rank == groups.pp_rank:
                whole = _gather_tensor_parallel(parameters[parameter.path].detach(), entry, groups)
            if pp_rank > 0 and groups.tp_rank == 0 and groups.cp_rank == 0:
                whole = _to_first_stage(whole, parameter, entry, pp_rank, device, groups)
            if groups.is_model_source and whole is not None:
                for name, piece in zip(entry.sources, entry.split(whole), strict=True):
                    yield name, piece.to("cpu", copy=True).contiguous()


def _gather_tensor_parallel(local: torch.Tensor, entry: ParameterMapping, groups: ParallelGroups) -> torch.Tensor:
    """The whole parameter, its sources in order."""
    if entry.shard_dim is None or groups.tp_size == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(groups.tp_size)]
    dist.all_gather(parts, local.contiguous(), group=groups.tp)
    sources = zip(*(entry.split(part) for part in parts), strict=True)
    return torch.cat([torch.cat(pieces, entry.shard_dim) for pieces in sources])


def _to_first_stage(
    whole: torch.Tensor | None,
    held: _Held,
    entry: ParameterMapping,
    pp_rank: int,
    device: torch.device,
    groups: ParallelGroups,
) -> torch.Tensor | None:
    """Send a whole parameter from its stage to the first one."""
    ranks = dist.get_process_group_ranks(groups.pp)
    if groups.pp_rank == pp_rank and whole is not None:
        dist.send(whole.contiguous(), ranks[0], group=groups.pp)
    elif groups.pp_rank == 0:
        shape = list(held.shape)
        if entry.shard_dim is not None:
            shape[entry.shard_dim] *= groups.tp_size
        whole = torch.empty(shape, dtype=held.dtype, device=device)
        dist.recv(whole, ranks[pp_rank], group=groups.pp)
        return whole
    return None
