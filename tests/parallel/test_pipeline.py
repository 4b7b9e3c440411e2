# SPDX-License-Identifier: Apache-2.0
"""Invariant: with virtual stages messages are sent one by one and overlap, and what is sent is not freed meanwhile;
without, they are batched and freed, which is right there.

Why is told in omni_engine/parallel/pipeline.py; that the first is needed is seen in
tests/distributed/test_pipeline_lengths.py. The second is a race that no test can bring about, so only the setting is
held here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omni_engine.parallel import ParallelGroups, pipeline_options

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("stages", [2, 4])
def test_virtual_stages_send_single_overlapped_messages_and_keep_them(
    stages: int, single_process: ParallelGroups
) -> None:
    groups = replace(single_process, pp_size=stages, vpp_size=2)
    options = pipeline_options(groups, torch.bfloat16)
    assert options["pipeline_model_parallel_size"] == stages
    assert options["virtual_pipeline_model_parallel_size"] == 2
    assert options["pipeline_dtype"] == torch.bfloat16
    assert options["overlap_p2p_comm"] and not options["batch_p2p_comm"]
    assert not options["deallocate_pipeline_outputs"]


def test_one_stage_a_rank_batches_and_frees(single_process: ParallelGroups) -> None:
    options = pipeline_options(replace(single_process, pp_size=2), torch.float32)
    assert options["virtual_pipeline_model_parallel_size"] is None
    assert options["batch_p2p_comm"] and not options["overlap_p2p_comm"]
    assert options["deallocate_pipeline_outputs"]
