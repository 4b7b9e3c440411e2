# SPDX-License-Identifier: Apache-2.0
"""Invariant: over all ranks of a layout every element of every Hugging Face tensor is written exactly once, at its own
place, and a fused parameter's optimizer state is split as the parameter is.

Ranks are played in one process by their group numbers, so the cut of a real run's parameters is not covered here
(tests/distributed/test_checkpoint_reshard.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from omni_engine.checkpoint.sharded import built_tensors, model_state
from omni_engine.models import build_family
from omni_engine.models.mapping import ModelMapping, ParameterMapping
from omni_engine.parallel import ParallelGroups
from tests.tiny import make_transformer

pytestmark = pytest.mark.fast


def parameters(
    mapping: ModelMapping, whole: dict[str, torch.Tensor], tp_rank: int, tp_size: int
) -> dict[str, torch.nn.Parameter]:
    """What a rank of a TP group would hold, cut from whole Hugging Face tensors."""

    def cut(tensor: torch.Tensor, entry: ParameterMapping) -> torch.Tensor:
        return tensor if entry.shard_dim is None else tensor.chunk(tp_size, entry.shard_dim)[tp_rank]

    return {
        path: torch.nn.Parameter(torch.cat([cut(whole[name], entry) for name in entry.sources]))
        for path, entry in mapping.entries.items()
    }


@pytest.mark.parametrize(("tp_size", "dp_size"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_every_element_is_written_once_at_its_place(
    tp_size: int, dp_size: int, model_folder: Path, single_process: ParallelGroups
) -> None:
    mapping = build_family("qwen_image", model_folder).mapping
    whole = {name: value.detach() for name, value in make_transformer().named_parameters()}
    written = {name: torch.zeros_like(value) for name, value in whole.items()}
    times = {name: torch.zeros_like(value) for name, value in whole.items()}
    for tp_rank, dp_rank in product(range(tp_size), range(dp_size)):
        groups = replace(single_process, tp_rank=tp_rank, tp_size=tp_size, dp_rank=dp_rank, dp_cp_rank=dp_rank)
        for tensor in built_tensors(model_state(parameters(mapping, whole, tp_rank, tp_size), mapping, groups)):
            assert tuple(tensor.global_shape) == tuple(whole[tensor.key].shape), tensor.key
            if not any(tensor.replica_id):
                written[tensor.key][tensor.global_slice()] = tensor.data.detach()
                times[tensor.key][tensor.global_slice()] += 1
    for name, value in whole.items():
        assert bool((times[name] == 1).all()), name
        assert torch.equal(written[name], value), name


def test_replicas_of_a_shard_have_different_ids(model_folder: Path, single_process: ParallelGroups) -> None:
    """Megatron takes two equal ids for two writers of one place."""
    mapping = build_family("qwen_image", model_folder).mapping
    whole = {name: value.detach() for name, value in make_transformer().named_parameters()}
    ids: Counter[tuple[str, tuple[int, ...], tuple[int, ...]]] = Counter()
    for tp_rank, dp_rank in product(range(2), range(2)):
        groups = replace(single_process, tp_rank=tp_rank, tp_size=2, dp_rank=dp_rank, dp_cp_rank=dp_rank)
        for tensor in built_tensors(model_state(parameters(mapping, whole, tp_rank, 2), mapping, groups)):
            ids[tensor.key, tensor.global_offset, tensor.replica_id] += 1
    assert set(ids.values()) == {1}


def test_optimizer_state_of_a_fused_parameter_follows_it(model_folder: Path, single_process: ParallelGroups) -> None:
    mapping = build_family("qwen_image", model_folder).mapping
    whole = {name: value.detach() for name, value in make_transformer().named_parameters()}
    state = model_state(parameters(mapping, whole, 0, 1), mapping, single_process)
    fused = state["blocks.1.text.qkv.weight"]
    assert isinstance(fused, ShardedTensorFactory)
    moment = torch.randn_like(fused.data)
    pieces = replace(fused, key=f"optimizer.state.exp_avg.{fused.key}", data=moment).build()
    keys = [piece.key for piece in pieces.values()]
    names = [f"transformer_blocks.1.attn.add_{name}_proj.weight" for name in "qkv"]
    assert keys == [f"optimizer.state.exp_avg.{name}" for name in names]
    assert torch.equal(fused.merge_fn({name: piece.data for name, piece in pieces.items()}), moment)


def test_unfused_parameters_are_the_parameters_themselves(model_folder: Path, single_process: ParallelGroups) -> None:
    """Megatron finds a parameter's optimizer state by the identity of the object."""
    mapping = build_family("qwen_image", model_folder).mapping
    held = parameters(mapping, {name: value.detach() for name, value in make_transformer().named_parameters()}, 0, 1)
    state = model_state(held, mapping, single_process)
    for path, parameter in held.items():
        assert state[path].data is parameter
        assert isinstance(state[path], ShardedTensor | ShardedTensorFactory)
