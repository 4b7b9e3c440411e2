# SPDX-License-Identifier: Apache-2.0
"""Invariant: what one stage packs the next unpacks, values and gradients, and a layout that does not fit is refused.

Does not cover the transport (tests/distributed/test_layout_parity.py).
"""

from __future__ import annotations

import pytest
import torch

from omni_engine.parallel.segments import Segment, pack, unpack

pytestmark = pytest.mark.fast
LAYOUT = [Segment("image", 3), Segment("text", 2), Segment("rows", 1)]


def test_round_trip_of_values_and_gradients() -> None:
    parts = {s.name: torch.randn(s.length, 2, 4, requires_grad=True) for s in LAYOUT}
    packed = pack(parts, LAYOUT)
    assert packed.shape == (6, 2, 4)
    cotangent = torch.randn(6, 2, 4)
    received = unpack(packed, LAYOUT)
    sum((received[name] * unpack(cotangent, LAYOUT)[name]).sum() for name in parts).backward()  # type: ignore[union-attr]
    for name, part in parts.items():
        assert torch.equal(received[name], part)
        assert torch.equal(part.grad, unpack(cotangent, LAYOUT)[name])


def test_lengths_that_do_not_fit_are_refused() -> None:
    parts = {"image": torch.zeros(3, 1, 1), "text": torch.zeros(1, 1, 1), "rows": torch.zeros(1, 1, 1)}
    with pytest.raises(ValueError, match="'text' has 1 rows, the layout says 2"):
        pack(parts, LAYOUT)
    with pytest.raises(ValueError, match="received 5 rows"):
        unpack(torch.zeros(5, 1, 1), LAYOUT)
