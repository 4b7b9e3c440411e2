# SPDX-License-Identifier: Apache-2.0
"""Invariant: the formula of communication says what the layouts are known for, counted here by hand, and its layers
are the model's. Exact.

Against what torch.distributed is really asked for: tests/distributed/test_communication.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_engine.arguments import ModelSettings, ParallelSettings
from omni_engine.models import build_family
from omni_engine.models.communication import Communication, Exchange, Work, totals
from omni_engine.models.costs import Layout
from omni_engine.models.policy import Policy
from omni_engine.models.qwen_image import QwenImageConfig
from omni_engine.models.qwen_image_costs import qwen_image_spec
from omni_engine.models.qwen_image_layers import qwen_image_network
from omni_engine.parallel import ParallelGroups
from tests.tiny import make_transformer, save_folder

pytestmark = pytest.mark.fast

CONFIG = QwenImageConfig(
    in_channels=16,
    out_channels=4,
    num_layers=4,
    attention_head_dim=8,
    num_attention_heads=8,
    joint_attention_dim=24,
    axes_dims_rope=(2, 2, 4),
)
HIDDEN, IMAGE, TEXT, BATCH, ELEMENT = 64, 16, 8, 2, 2
WORK = Work(1, BATCH, {"image": IMAGE, "text": TEXT})
TOKEN = BATCH * HIDDEN * ELEMENT
"""Bytes of a token of every sample."""
# A last block without the end of its text stream.
STREAM_BLOCKS = {"image": 4, "text": 3}


def communication(pp_rank: int = 0, dp: int = 1, **layout: Any) -> Communication:
    placed = Layout(ParallelSettings(**layout), dp)
    count = placed.pp * placed.vpp
    stages = [range(4 * index // count, 4 * (index + 1) // count) for index in range(count)]
    return Communication(qwen_image_network(CONFIG), placed, stages, pp_rank, ELEMENT)


def tokens_only(exchanges: list[Exchange]) -> list[Exchange]:
    return [one for one in exchanges if "tokens" in one.reason]


def test_the_layers_are_those_of_the_model(tmp_path: Path, single_process: ParallelGroups) -> None:
    family = build_family("qwen_image", save_folder(make_transformer(layers=3), tmp_path))
    model = ModelSettings(model=str(tmp_path), height=16, width=16)
    policy = Policy(family, single_process, model, ParallelSettings())
    network = qwen_image_network(family.config)  # type: ignore[attr-defined]
    listed = [(size, not layer.idle) for layer in network.stage(range(3)) for size in layer.parameters(1)]
    # Buckets are filled in this order.
    assert listed == [(weight.numel(), weight.requires_grad) for weight in policy.parameters().values()]


def test_one_process_exchanges_nothing() -> None:
    alone = communication()
    assert not [
        *alone.train(WORK, "full"),
        *alone.update(),
        *alone.check(),
        *alone.rollout_broadcasts(WORK, 16, True, "image"),
    ]


def test_tensor_parallel_sums_every_stream_twice_a_block_and_direction() -> None:
    two = communication(tensor_model_parallel_size=2)
    forward, backward = totals(tokens_only(two.forward(WORK))), totals(tokens_only(two.backward(WORK, "none")))
    size = TOKEN * (IMAGE * 2 * 4 + TEXT * 2 * 3)
    assert forward == {("tp", "all_reduce"): (2 * 4 + 2 * 3, size)}
    # The last block's text still has queries, keys and values.
    assert backward == {("tp", "all_reduce"): (2 * 4 + 2 * 3 + 1, size + TOKEN * TEXT)}


def test_sequence_parallel_gathers_and_scatters_twice_and_gathers_inputs_again_for_the_gradients() -> None:
    two = communication(tensor_model_parallel_size=2, sequence_parallel=True)
    forward, backward = totals(tokens_only(two.forward(WORK))), totals(tokens_only(two.backward(WORK, "none")))
    rows, columns = 2 * 4 + 2 * 3, 2 * 4 + 2 * 3 + 1
    row_bytes = TOKEN * (IMAGE * 2 * 4 + TEXT * 2 * 3)
    column_bytes = row_bytes + TOKEN * TEXT
    assert forward == {("tp", "all_gather"): (columns, column_bytes), ("tp", "reduce_scatter"): (rows, row_bytes)}
    assert backward == {
        ("tp", "all_gather"): (columns + rows, column_bytes + row_bytes),
        ("tp", "reduce_scatter"): (columns, column_bytes),
    }


def test_a_gather_and_a_scatter_send_what_one_all_reduce_sends() -> None:
    def sent(**layout: Any) -> float:
        both = communication(tensor_model_parallel_size=4, **layout)
        stage = [*tokens_only(both.forward(WORK)), *tokens_only(both.backward(WORK, "none"))]
        return sum(one.sent(4) for one in stage if "again" not in one.reason)

    assert sent() == sent(sequence_parallel=True)


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2), (2, 4), (4, 2)])
def test_usp_exchanges_heads_twice_and_passes_keys_and_values_around(ulysses: int, ring: int) -> None:
    usp = communication(ulysses_degree=ulysses, ring_degree=ring)
    held = (IMAGE + TEXT) // (ulysses * ring) * TOKEN  # of one of queries, keys, values
    forward, backward = totals(usp.forward(WORK)), totals(usp.backward(WORK, "none"))
    if ulysses > 1:
        assert forward["ulysses", "all_to_all"] == backward["ulysses", "all_to_all"] == (8, 4 * 4 * held)
    if ring > 1:
        assert forward["ring", "send"] == (4 * (ring - 1), 4 * (ring - 1) * 2 * held)
        # Gradients travel in float32, which is twice as wide here, and one step further.
        assert backward["ring", "send"] == (4 * 2 * (ring - 1), 4 * (ring - 1) * 2 * held + 4 * (ring - 1) * 4 * held)
    assert forward["cp", "all_gather"] == (1, IMAGE * BATCH * 16 * ELEMENT)


def test_padding_travels() -> None:
    odd = Work(1, BATCH, {"image": 15, "text": 5})
    four = communication(ulysses_degree=2, ring_degree=2)
    assert totals(four.forward(odd)) == totals(four.forward(WORK))


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2)])
def test_every_stage_but_the_last_sends_a_micro_batch_on_and_every_but_the_first_sends_it_back(
    pp: int, vpp: int
) -> None:
    layout = {"pipeline_model_parallel_size": pp, "num_virtual_stages_per_pipeline_rank": vpp}
    work = Work(4, BATCH, WORK.tokens)
    ranks = [communication(rank, **layout) for rank in range(pp)]
    for passes in ([one.forward(work) for one in ranks], [one.backward(work, "none") for one in ranks]):
        sent = [totals(one).get(("pp", "send"), (0, 0)) for one in passes]
        assert sum(count for count, _ in sent) == 4 * (pp * vpp - 1)
        assert all(size == count * (IMAGE + TEXT + 1) * TOKEN for count, size in sent)
    assert [totals(one.evaluate(Work(3, BATCH, WORK.tokens))) for one in ranks] == [
        totals(one.forward(work if vpp > 1 else Work(3, BATCH, WORK.tokens))) for one in ranks
    ]


def test_the_distributed_optimizer_scatters_gradients_and_gathers_weights() -> None:
    weights = qwen_image_spec(CONFIG, IMAGE, TEXT).trained_parameters
    plain, distributed = communication(dp=2), communication(dp=2, use_distributed_optimizer=True)
    assert totals(plain.reduce_gradients()) == {("dp_cp", "all_reduce"): (1, 4 * weights)}
    assert not plain.update()  # the norm is over one replica, which is one rank
    (scattered,) = distributed.reduce_gradients()
    update = totals(distributed.update())
    padded = scattered.payload // 4
    assert scattered.kind == "reduce_scatter" and weights <= padded < 1.1 * weights and padded % 128 == 0
    assert update == {("dp_cp", "all_gather"): (1, ELEMENT * padded), ("world", "all_reduce"): (1, 4)}
