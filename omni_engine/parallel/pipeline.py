# SPDX-License-Identifier: Apache-2.0
"""Megatron's pipeline settings, of which some combinations give wrong gradients without a word."""

from __future__ import annotations

from typing import Any

import torch

from omni_engine.parallel.groups import ParallelGroups


def pipeline_options(groups: ParallelGroups, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments of `TransformerConfig`. `dtype` is that of the tensor between stages.

    With virtual stages a rank of two has two sends to the same peer under way. Batched, they are matched by order and
    may be swapped: gradients are then wrong, silently if all shapes are equal (seen in megatron-core 0.16.1 and
    0.19.2). Single, overlapped messages are right for every number of stages. Their outputs must outlive the message:
    freed while it is under way, what arrives is sometimes other memory (seen with gloo: the loss off in its fifth
    digit).
    """
    virtual = groups.vpp_size > 1
    return {
        "pipeline_model_parallel_size": groups.pp_size,
        "virtual_pipeline_model_parallel_size": groups.vpp_size if virtual else None,
        "pipeline_dtype": dtype,
        "overlap_p2p_comm": virtual,
        "batch_p2p_comm": not virtual,
        "deallocate_pipeline_outputs": not virtual,
    }
