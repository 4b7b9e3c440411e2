# SPDX-License-Identifier: Apache-2.0
"""Megatron's data-parallel wrappers of a policy's chunks: gradients reduced in float32, in the backward pass if asked,
and under the distributed optimizer weights gathered in the next forward pass if asked.

Set up as Megatron's own training loop does it (`megatron/training/training.py`, 0.16 to 0.19).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

from omni_engine.arguments import ParallelSettings
from omni_engine.models.policy import Policy


def wrap_chunks(policy: Policy, parallel: ParallelSettings) -> list[DistributedDataParallel]:
    """Wrap the policy's chunks, and tell Megatron's schedules when to reduce and to gather."""
    interleaved = len(policy.chunks) > 1
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        # The stages of an interleaved pipeline gather at the same moment, so that none waits for another's collective.
        align_param_gather=parallel.overlap_param_gather and interleaved,
        bucket_size=parallel.ddp_bucket_size,
    )
    chunks = [
        # The communication of later chunks hides behind the earlier ones whole, so it is not cut up.
        DistributedDataParallel(policy.config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(policy.chunks)
    ]
    config = policy.config
    config.finalize_model_grads_func = finalize_model_grads
    if parallel.overlap_grad_reduce:
        config.no_sync_func = _one_or_list([chunk.no_sync for chunk in chunks])
        # In a pipeline only the first stage reduces within its backward pass; the others do so while they would idle.
        config.grad_sync_func = _one_or_list([chunk.start_grad_sync for chunk in chunks])
    if ddp_config.align_param_gather:
        config.param_sync_func = _one_or_list([partial(start_param_sync, chunk) for chunk in chunks])
    return chunks


def _one_or_list(functions: list[Callable[..., Any]]) -> Any:
    """As the schedules want it: they take a list for several chunks only."""
    return functions if len(functions) > 1 else functions[0]


def _bucket_groups(chunk: DistributedDataParallel) -> Iterator[Any]:
    yield from chunk.bucket_groups
    yield from chunk.expert_parallel_bucket_groups


def start_param_sync(chunk: DistributedDataParallel, *parameters: Any) -> None:
    """Start to gather a chunk's stepped weights.

    Megatron's `start_param_sync` gathers again what a forward-only pass, such as a rollout, has gathered already.
    """
    for group in _bucket_groups(chunk):
        if not group.param_gather_dispatched:
            group.start_param_sync()


def finish_param_sync(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather what is still to be gathered of the stepped weights, and wait for it. A collective over the replicas."""
    for chunk in chunks:
        if not chunk.ddp_config.overlap_param_gather:
            continue
        for group in _bucket_groups(chunk):
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                group.start_param_sync(force_sync=True)
