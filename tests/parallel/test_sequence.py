# SPDX-License-Identifier: Apache-2.0
"""Invariant: the parts of a stream, put together in the order of their index, are the stream and its padding; a context
rank's part is that of its tensor-parallel ranks in a row; and the key mask lists tokens in the order in which the
context ranks hold them.

Not covered: the gather between processes (tests/distributed).
"""

from __future__ import annotations

from itertools import product
from typing import Any, cast

import pytest
import torch

from omni_engine.parallel import TokenSharding

pytestmark = pytest.mark.fast


def shardings(tp: int, cp: int) -> list[TokenSharding]:
    """Of all ranks of a layout with sequence parallelism, tp fastest."""
    nobody = cast("Any", None)
    return [TokenSharding(tp * cp, c * tp + t, c, cp, nobody) for c, t in product(range(cp), range(tp))]


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 4), (2, 3)])
@pytest.mark.parametrize("tokens", [1, 5, 7, 12, 33])
def test_the_parts_in_a_row_are_the_stream_and_its_padding(tp: int, cp: int, tokens: int) -> None:
    ranks = shardings(tp, cp)
    stream = torch.arange(1, tokens + 1)[:, None].expand(-1, 3)
    whole = torch.cat([rank.take(stream) for rank in ranks])
    assert len(whole) == ranks[0].padded(tokens) == tp * cp * ranks[0].local(tokens)
    assert torch.equal(whole[:tokens], stream) and not whole[tokens:].any()
    assert ranks[0].padded(tokens) - tokens < tp * cp
    for context in range(cp):
        own = ranks[context * tp : (context + 1) * tp]
        assert all(torch.equal(r.take_context(stream), torch.cat([o.take(stream) for o in own])) for r in own)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 4), (2, 3)])
def test_the_mask_lists_tokens_as_the_context_ranks_hold_them(tp: int, cp: int) -> None:
    ranks = shardings(tp, cp)
    text = torch.arange(5) < torch.tensor([2, 5])[:, None]
    image = torch.ones(2, 7, dtype=torch.bool)
    held = [torch.cat([rank.take_context(stream.T) for stream in (text, image)]) for rank in ranks[::tp]]
    assert torch.equal(ranks[0].key_mask([text, image]), torch.cat(held).T)
