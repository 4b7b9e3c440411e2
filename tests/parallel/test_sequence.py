# SPDX-License-Identifier: Apache-2.0
"""Invariant: the parts of a stream, rank by rank, are the stream and then its padding, also where a rank has nothing
but padding; context ranks hold consecutive tokens, which their tensor-parallel ranks cut further; and the mask of joint
keys stands in the order in which context ranks hold their tokens.

Exact: nothing is computed. Gathering over ranks is covered by the tests of whole layouts (tests/distributed).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omni_engine.parallel import ParallelGroups, TokenSharding

pytestmark = pytest.mark.fast

LENGTHS = (1, 5, 7, 8, 33)
SIZES = ((1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (3, 2))
"""Context and tensor-parallel ranks."""


def all_ranks(single_process: ParallelGroups, context: int, tensor: int, sequence: bool) -> list[TokenSharding]:
    """The sharding as each rank has it, in the order of the context ranks, their tensor-parallel ranks in turn."""
    return [
        TokenSharding.of(
            replace(single_process, cp_rank=cp, cp_size=context, tp_rank=tp, tp_size=tensor), sequence_parallel=sequence
        )
        for cp in range(context)
        for tp in range(tensor)
    ]


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(("context", "tensor"), SIZES)
def test_parts_in_order_are_the_stream_and_its_padding(
    context: int, tensor: int, tokens: int, single_process: ParallelGroups
) -> None:
    ranks = all_ranks(single_process, context, tensor, sequence=True)
    stream = torch.arange(1, tokens + 1.0)[:, None].expand(-1, 2)
    parts = [rank.take(stream) for rank in ranks]
    shards = context * tensor
    assert {rank.shards for rank in ranks} == {shards}
    length = -(-tokens // shards)
    assert {len(part) for part in parts} == {rank.local(tokens) for rank in ranks} == {length}
    assert {rank.padded(tokens) for rank in ranks} == {length * shards}
    whole = torch.cat(parts)
    assert torch.equal(whole[:tokens], stream) and not whole[tokens:].any()
    if tokens == 5 and shards == 4:
        assert not parts[-1].any()  # a rank with nothing but padding


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(("context", "tensor"), SIZES)
def test_what_a_context_rank_attends_with_is_what_its_tensor_ranks_hold(
    context: int, tensor: int, tokens: int, single_process: ParallelGroups
) -> None:
    ranks = all_ranks(single_process, context, tensor, sequence=True)
    stream = torch.arange(1, tokens + 1.0)
    parts = torch.cat([rank.take(stream) for rank in ranks]).unflatten(0, (context, -1))
    for index, rank in enumerate(ranks):
        assert torch.equal(rank.take_context(stream), parts[index // tensor])


def test_tensor_ranks_hold_the_same_tokens_without_sequence_parallelism(single_process: ParallelGroups) -> None:
    ranks = all_ranks(single_process, 2, 2, sequence=False)
    parts = [rank.take(torch.arange(7)) for rank in ranks]
    assert torch.equal(parts[0], parts[1]) and torch.equal(parts[2], parts[3])
    assert torch.equal(torch.cat([parts[0], parts[2]]), torch.tensor([0, 1, 2, 3, 4, 5, 6, 0]))


@pytest.mark.parametrize(("context", "tensor"), SIZES)
def test_key_mask_stands_in_the_order_of_the_ranks(context: int, tensor: int, single_process: ParallelGroups) -> None:
    """Text and image of two samples: what the mask keeps of the keys is what is no padding, and nothing else."""
    ranks = all_ranks(single_process, context, tensor, sequence=True)
    valid_text = torch.arange(5) < torch.tensor([[2], [5]])
    valid_image = torch.ones(2, 7, dtype=torch.bool)
    # Of each sample: its texts' and its images' tokens by number, 0 on padding.
    streams = [torch.where(valid, torch.arange(1, valid.shape[1] + 1), 0).T for valid in (valid_text, valid_image)]
    held = torch.cat([torch.cat([rank.take_context(stream) for stream in streams]) for rank in ranks[::tensor]]).T
    for rank in ranks:
        mask = rank.key_mask([valid_text, valid_image])
        assert mask.dtype == torch.bool and torch.equal(mask, held > 0)


def test_one_rank_gathers_nothing_and_pads_nothing(single_process: ParallelGroups) -> None:
    sharding = TokenSharding.of(single_process, sequence_parallel=False)
    stream = torch.randn(5, 3)
    assert sharding.gather(stream, 5) is stream
    assert torch.equal(sharding.take(stream), stream) and sharding.padded(5) == 5
