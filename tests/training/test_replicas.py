# SPDX-License-Identifier: Apache-2.0
"""Invariant: the checksum of a weight is the sum that its docstring gives, of its bits, so that one changed bit, two
elements that changed places and another order of the elements all show; and a single process has nothing to compare.

Exact, so there is no tolerance. Not covered here: what ranks find of each other
(tests/distributed/test_replicas.py).
"""

from __future__ import annotations

import pytest
import torch

from omni_engine.parallel import ParallelGroups
from omni_engine.training import replicas
from omni_engine.training.replicas import ReplicaCheck, checksum
from tests.engine_parts import Setup, build_engine

pytestmark = pytest.mark.fast

INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def slowly(tensor: torch.Tensor) -> int:
    """The docstring's sum in Python's integers, folded to 64 bits with a sign."""
    bits = tensor.contiguous().view(INTEGER[tensor.element_size()]).flatten().tolist()
    total = sum(value * (2 * index + 1) for index, value in enumerate(bits)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 7),
        torch.randn(13),
        torch.randn(()),
        torch.randn(3, 4, 5).bfloat16(),
        torch.randn(6, 4).half().t(),
        -torch.rand(40, 30) * 1e30,
    ],
    ids=["matrix", "vector", "number", "bf16", "transposed", "large"],
)
def test_it_is_the_sum_of_the_docstring(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checksum(tensor).item() == slowly(tensor)
    monkeypatch.setattr(replicas, "_PART", 8)  # many parts, the last one smaller
    assert checksum(tensor).item() == slowly(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_changed_bit_and_every_exchange_shows(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 6).to(dtype)
    right = checksum(weight).item()
    bits = INTEGER[weight.element_size()]
    for bit in range(8 * weight.element_size()):
        wrong = weight.clone()
        mask = -(2**bit) if bit == 8 * weight.element_size() - 1 else 2**bit
        wrong.view(bits)[3, 2] ^= mask
        assert checksum(wrong).item() != right, bit
    for other in (weight.flip(0), weight.flip(1), weight.roll(1, 1), -weight):
        assert checksum(other).item() != right
    exchanged = weight.clone()
    exchanged[0, 0], exchanged[5, 3] = weight[5, 3], weight[0, 0]
    assert checksum(exchanged).item() != right
    # A sign is the highest bit, of which even multiples vanish in a sum that is no wider than the elements.
    ones = torch.ones(2, 2, dtype=dtype)
    swapped_signs = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=dtype)
    assert checksum(swapped_signs).item() != checksum(swapped_signs.flip(1)).item()
    assert checksum(ones).item() != checksum(-ones).item()


def test_one_process_has_nothing_to_compare(folder: object, single_process: ParallelGroups) -> None:
    engine = build_engine(folder, single_process, Setup())  # type: ignore[arg-type]
    assert ReplicaCheck(engine.policy).difference() is None
