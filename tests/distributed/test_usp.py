# SPDX-License-Identifier: Apache-2.0
"""Invariant: attention of tokens that are shared by Ulysses x ring ranks is the attention of all tokens, forward and
backward, with the platform's kernel of a ring step and with plain matrix products, without a mask, with padding so long
that ranks have no key of a sample at all, and with keys masked here and there.

The oracle is torch's attention in float64 on the same numbers. Tolerances, of the norm of an output, and of the
gradient of queries, of keys and of values each: 5e-6 in float32 (1.7e-6 was measured), 2e-2 in bfloat16 (9.4e-3), whose
steps are 2^-8 = 4e-3. A key that is left out or counted twice changes them by a tenth.

Not covered: streams, rotation and padding to equal parts (tests/parallel/test_sequence.py, test_token_lengths.py),
kernels of devices other than the CPU.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.launches import Launches
from tests.distributed.usp_worker import CASES, DTYPES, inputs, key_mask

DEGREES = {2: ("2x1", "1x2"), 4: ("4x1", "2x2", "1x4")}
TOLERANCES = {"float32": 5e-6, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    worker = Path(__file__).with_name("usp_worker.py")
    return Launches(worker, tmp_path_factory.mktemp("usp"), DEGREES, timeout=300)


@cache
def expected(mask: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [S, B, H, D] and gradient [S, B, 3, H, D] in float64."""
    whole, cotangent = inputs(DTYPES[dtype])
    qkv = whole.double().requires_grad_()
    keys = key_mask(mask)
    attended = F.scaled_dot_product_attention(
        *qkv.permute(2, 1, 3, 0, 4), attn_mask=None if keys is None else keys[:, None, None]
    )
    out = attended.permute(2, 0, 1, 3)
    out.backward(cotangent.double())
    assert qkv.grad is not None
    return out.detach(), qkv.grad


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("processes", "degrees"), [(processes, name) for processes, names in DEGREES.items() for name in names]
)
def test_sharded_attention_is_the_attention_of_all_tokens(
    processes: int, degrees: str, case: str, launches: Launches
) -> None:
    mask, _, dtype = case.split("-")
    ranks = launches.ranks(processes, degrees, case)
    ranks.sort(key=lambda rank: rank.place["cp"])
    out = torch.cat([rank.tensors["out"] for rank in ranks])
    grad = torch.cat([rank.tensors["grad"] for rank in ranks])
    assert out.dtype == grad.dtype == DTYPES[dtype]
    expected_out, expected_grad = expected(mask, dtype)
    pairs = {"out": (out, expected_out)}
    pairs |= {name: (grad[:, :, index], expected_grad[:, :, index]) for index, name in enumerate("qkv")}
    found = {name: float((ours - theirs).norm() / theirs.norm()) for name, (ours, theirs) in pairs.items()}
    assert max(found.values()) < TOLERANCES[dtype], found
    if mask == "padding":  # a key that counts for nothing has no gradient, not a small one
        assert not grad[5:, 0, 1:].any() and not grad[-1, 1, 1:].any()
