# SPDX-License-Identifier: Apache-2.0
"""Invariant: guidance is QwenImagePipeline's combination, with the norm of the conditional prediction token by token.

Not covered: the order of the branches in a batch, which the model family owns.
"""

from __future__ import annotations

import pytest
import torch

from omni_engine.flow import true_cfg

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_pipelines_expression(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    conditional, unconditional = torch.randn(2, 3, 8, 64).to(dtype)
    combined = unconditional + 4.0 * (conditional - unconditional)
    norms = torch.norm(conditional, dim=-1, keepdim=True), torch.norm(combined, dim=-1, keepdim=True)
    expected = combined * (norms[0] / norms[1])
    result = true_cfg(conditional, unconditional, 4.0)
    assert result.dtype == dtype and torch.equal(result, expected)


def test_keeps_the_conditional_norm_and_equal_branches() -> None:
    torch.manual_seed(0)
    conditional, unconditional = torch.randn(2, 3, 8, 64)
    guided = true_cfg(conditional, unconditional, 3.0)
    torch.testing.assert_close(guided.norm(dim=-1), conditional.norm(dim=-1))
    torch.testing.assert_close(true_cfg(conditional, conditional, 3.0), conditional)


def test_a_token_that_vanishes_stays_zero_with_a_finite_gradient() -> None:
    conditional = torch.zeros(1, 2, 4)
    conditional[0, 1] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    conditional.requires_grad_()
    guided = true_cfg(conditional, torch.zeros(1, 2, 4), 2.0)
    guided.sum().backward()
    assert torch.equal(guided[0, 0], torch.zeros(4))
    assert conditional.grad is not None and torch.isfinite(conditional.grad).all()


def test_gradient_is_that_of_the_formula() -> None:
    torch.manual_seed(0)
    conditional, unconditional = (torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda c, u: true_cfg(c, u, 4.0), (conditional, unconditional))


def test_refuses_a_scale_without_guidance_and_branches_that_differ() -> None:
    velocity = torch.randn(1, 2, 4)
    for scale in (1.0, 0.0, float("nan")):
        with pytest.raises(ValueError, match="scale above 1"):
            true_cfg(velocity, velocity, scale)
    with pytest.raises(ValueError, match="branches differ"):
        true_cfg(velocity, velocity.expand(3, 2, 4), 2.0)
    with pytest.raises(ValueError, match="branches differ"):
        true_cfg(velocity, velocity.bfloat16(), 2.0)
