# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds: every tensor of model and optimizer by its Hugging Face name and its place in the whole.

Keys are `NAME` for a weight, `optimizer.state.{exp_avg,exp_avg_sq,fp32_param}.NAME` for what the optimizer keeps of it,
`fp32_param` being the float32 weight behind a 16-bit one, and `ema.NAME` for its moving average. They do not depend on
the layout or on the kind of optimizer, so a run may resume with others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from omni_engine.models.mapping import ModelMapping, ParameterMapping
from omni_engine.parallel import ParallelGroups

AVERAGE_PREFIX = "ema."
_PREFIX = "optimizer.state."
_MAIN_WEIGHT = f"{_PREFIX}fp32_param."
# What DistributedOptimizer calls the weight it steps, 16-bit model or not.
_DISTRIBUTED_WEIGHT = f"{_PREFIX}param."

# The one form of DistributedOptimizer's state that another TP or PP layout can load.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def model_state(
    parameters: Mapping[str, torch.Tensor], mapping: ModelMapping, groups: ParallelGroups, prefix: str = ""
) -> dict[str, ShardedBase]:
    """Sharded parameters of a rank, or tensors of their form, by their path; a fused one is a factory of its sources.

    Args:
        prefix: of the keys.

    Raises:
        ValueError: the mapping table lacks a parameter.
    """
    return {path: _sharded(parameters[path], entry, groups, prefix) for path, entry in mapping.of(parameters).items()}


def _sharded(parameter: torch.Tensor, entry: ParameterMapping, groups: ParallelGroups, prefix: str) -> ShardedBase:
    # All zero marks the replica that is written: of a sharded parameter that of the first rank over dp and cp,
    # of a replicated one the first TP rank's too. A stage owns its parameters alone.
    replica = (0, groups.tp_rank if entry.shard_dim is None else 0, groups.dp_cp_rank)
    if len(entry.sources) == 1:
        return _source(prefix + entry.sources[0], parameter, entry.shard_dim, replica, groups)
    return ShardedTensorFactory(
        prefix + entry.target,
        parameter,
        build_fn=partial(_split_sources, entry, groups),
        merge_fn=partial(_fuse_sources, entry),
        replica_id=replica,
    )


def _source(
    key: str, local: torch.Tensor, shard_dim: int | None, replica: tuple[int, ...], groups: ParallelGroups
) -> ShardedTensor:
    offsets = [] if shard_dim is None else [(shard_dim, groups.tp_rank, groups.tp_size)]
    return ShardedTensor.from_rank_offsets(key, local, *offsets, replica_id=replica)


def _split_sources(
    entry: ParameterMapping, groups: ParallelGroups, key: str, local: torch.Tensor, replica: Any, flattened_range: Any
) -> dict[str, ShardedTensor]:
    """Megatron's build function: it is given the optimizer's tensors too, with a prefix before the key."""
    prefix = key.removesuffix(entry.target)
    pieces = zip(entry.sources, entry.split(local), strict=True)
    return {name: _source(prefix + name, piece, entry.shard_dim, replica, groups) for name, piece in pieces}


def _fuse_sources(entry: ParameterMapping, pieces: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([pieces[name] for name in entry.sources])


def optimizer_state(
    optimizer: Any, model: dict[str, ShardedBase], is_loading: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizer's sharded tensors, and the rest of its state dict: this run's own hyperparameters.

    Only the tensors are ever written. A collective while saving.

    Args:
        optimizer: of Megatron; its state is allocated if it has not stepped yet.
        model: what `model_state` gave.
        is_loading: whether the tensors will be filled instead of written.
    """
    step = adam_step(optimizer)
    if step == 0:
        for inner in _inner(optimizer):
            _allocate(inner)
        # Megatron leaves a count of zero out of the state, and torch's Adam loads no state without a count.
        set_adam_step(optimizer, 1)
    state = optimizer.sharded_state_dict(model, is_loading, metadata=dict(_METADATA))
    set_adam_step(optimizer, step)
    weights = {_DISTRIBUTED_WEIGHT + sharded.key: sharded.data for sharded in model.values()}

    def rename(value: Any) -> Any:
        if isinstance(value, LocalNonpersistentObject):
            return value.unwrap()
        if not isinstance(value, ShardedBase) or value.key not in weights:
            return value
        weight = weights[value.key]
        if weight.dtype == torch.float32:
            return weight.detach()  # steps the model's weight itself, which is written as such
        value.key = _MAIN_WEIGHT + value.key.removeprefix(_DISTRIBUTED_WEIGHT)
        return value

    dict_list_map_inplace(rename, state)
    tensors, rest = extract_sharded_base(state)
    return tensors, rest


def built_tensors(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    """This rank's sharded tensors, those of factories included."""
    for value in nested_values(state):
        yield from value.build().values() if isinstance(value, ShardedTensorFactory) else [value]


def is_weight_key(key: str) -> bool:
    """Whether a key is a weight's own, not of the optimizer's part or of the average."""
    return not key.startswith((_PREFIX, AVERAGE_PREFIX))


def _inner(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _adams(optimizer: Any) -> list[Any]:
    """The Adams that step: with --optimizer-cpu-offload one of the host and one of the device."""
    inner = [one.optimizer for one in _inner(optimizer)]
    return [adam for one in inner for adam in getattr(one, "sub_optimizers", [one])]


def _allocate(inner: Any) -> None:
    """Give an optimizer that has not stepped the state that its first step would begin with."""
    if inner.init_state_fn is not None:
        inner.init_state_fn(inner.optimizer, inner.config)
        return
    # Megatron has no such function for the offloaded optimizer, only a step on noise.
    for adam in inner.optimizer.sub_optimizers:
        for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
            zeros = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            adam.state[parameter].update(zeros)
    inner.optimizer._sync_sub_optimizers_state_to_hdo()


def adam_step(optimizer: Any) -> int:
    """Steps that Adam has counted; the same for all parameters.

    Torch's Adam counts in each parameter's state, the fused ones in the parameter group.
    """
    for adam in _adams(optimizer):
        for state in adam.state.values():
            if "step" in state:
                return int(state["step"])
        for group in adam.param_groups:
            if "step" in group:
                return int(group["step"])
    return 0


def set_adam_step(optimizer: Any, step: int) -> None:
    """Set the count of every parameter, each with a tensor of its own where it is a tensor."""
    for adam in _adams(optimizer):
        if not isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
            for group in adam.param_groups:
                group["step"] = step
            continue
        for state in adam.state.values():
            state["step"] = torch.tensor(float(step))
    for inner in _inner(optimizer):
        if hasattr(inner.optimizer, "sub_optimizers"):
            # A count that Megatron has loaded here would be set again before every step of the device's Adam.
            for group in inner.optimizer.param_groups:
                group.pop("step", None)
