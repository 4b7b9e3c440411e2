# SPDX-License-Identifier: Apache-2.0
"""Invariant: the six coefficients are the published step, log-prob and KL of every SDE type, at every step.

The oracle is the formulas as published (a standard deviation and the predicted clean image), in float64. A step without
noise has no log-prob and says so. Not covered: the peers' float32 figures, which tests/ops compares.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from omni_engine.flow import (
    Schedule,
    SchedulerConfig,
    StepCoefficients,
    coefficient_table,
    flow_match_schedule,
    log_prob_convention,
    require_log_prob,
    step_coefficients,
)

pytestmark = pytest.mark.fast

SCHEDULE = flow_match_schedule(SchedulerConfig(shift=3.0), 10, 256)
SIGMAS: list[float] = SCHEDULE.sigmas.double().tolist()
X, V = torch.linspace(-2, 2, 7, dtype=torch.float64), torch.linspace(1.5, -1, 7, dtype=torch.float64)


def published(sde_type: str, eta: float, step: int) -> tuple[Tensor, float]:
    """Mean and standard deviation of x_next in the form of the papers."""
    sigma, sigma_next = SIGMAS[step], SIGMAS[step + 1]
    dt = sigma_next - sigma
    if sde_type == "sde":
        std = math.sqrt(sigma / (1 - (SIGMAS[1] if sigma == 1 else sigma))) * eta
        mean = X * (1 + std**2 / (2 * sigma) * dt) + V * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
        return mean, std * math.sqrt(-dt)
    clean, noise = X - sigma * V, X + (1 - sigma) * V
    if sde_type == "dance_sde":
        score = -(X - clean * (1 - sigma)) / sigma**2
        return X + V * dt - 0.5 * eta**2 * score * dt, eta * math.sqrt(-dt)
    std = sigma_next * math.sin(eta * math.pi / 2)
    return clean * (1 - sigma_next) + noise * math.sqrt(sigma_next**2 - std**2), std


@pytest.mark.parametrize(("sde_type", "eta"), [("sde", 0.7), ("sde", 1.2), ("dance_sde", 0.3), ("cps", 0.8)])
@pytest.mark.parametrize("step", range(10))
def test_step_is_the_published_one(sde_type: str, eta: float, step: int) -> None:
    a, b, s, *_ = step_coefficients(SIGMAS[step], SIGMAS[step + 1], SIGMAS[1], eta, sde_type)
    mean, std = published(sde_type, eta, step)
    torch.testing.assert_close(a * X + b * V, mean, rtol=1e-12, atol=1e-12)
    assert s == pytest.approx(std, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("sde_type", "eta"), [("sde", 0.7), ("dance_sde", 0.3), ("cps", 0.8)])
@pytest.mark.parametrize("step", range(9))
def test_log_prob_and_kl_are_those_of_the_transition(sde_type: str, eta: float, step: int) -> None:
    q = step_coefficients(SIGMAS[step], SIGMAS[step + 1], SIGMAS[1], eta, sde_type)
    mean, std = published(sde_type, eta, step)
    x_next = mean + std * torch.linspace(-1.5, 1.7, 7, dtype=torch.float64)
    ours = q.c - q.w * (x_next - mean).square().mean()
    if log_prob_convention(sde_type) == "normalized":
        expected = Normal(mean, std).log_prob(x_next).mean()
    else:
        expected = -(x_next - mean).square().mean()
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)

    other = q.a * X + q.b * (V + 0.1 * X)
    expected_kl = kl_divergence(Normal(mean, std), Normal(other, std)).mean()
    torch.testing.assert_close(q.k * (0.1 * X).square().mean(), expected_kl, rtol=1e-10, atol=1e-12)


def test_flow_grpo_kl_leaves_out_the_step_length_for_sde_only() -> None:
    for sde_type, eta in (("sde", 0.7), ("dance_sde", 0.3), ("cps", 0.8)):
        for step in range(9):
            step_sizes = SIGMAS[step], SIGMAS[step + 1]
            transition = step_coefficients(*step_sizes, SIGMAS[1], eta, sde_type)
            peers = step_coefficients(*step_sizes, SIGMAS[1], eta, sde_type, "flow_grpo")
            factor = step_sizes[0] - step_sizes[1] if sde_type == "sde" else 1.0
            assert peers.k == pytest.approx(transition.k * factor, rel=1e-12)
            assert peers[:5] == transition[:5]


@pytest.mark.parametrize("sde_type", ["sde", "dance_sde", "cps"])
def test_without_noise_every_type_is_the_euler_step(sde_type: str) -> None:
    for step in range(10):
        q = step_coefficients(SIGMAS[step], SIGMAS[step + 1], SIGMAS[1], 0.0, sde_type)
        euler = step_coefficients(SIGMAS[step], SIGMAS[step + 1], SIGMAS[1], 0.7, "ode")
        assert q[:3] == pytest.approx(euler[:3], abs=1e-15)
        assert euler[:3] == (1.0, SIGMAS[step + 1] - SIGMAS[step], 0.0)
        assert all(math.isnan(value) for value in (*q[3:], *euler[3:]))


def test_cps_keeps_the_noise_of_a_perfect_prediction() -> None:
    """With x = (1 - sigma) clean + sigma noise the next latent's noise has exactly variance sigma_next^2."""
    clean, noise = torch.linspace(-1, 1, 5, dtype=torch.float64), torch.linspace(2, -2, 5, dtype=torch.float64)
    for step in range(10):
        sigma, sigma_next = SIGMAS[step], SIGMAS[step + 1]
        q = step_coefficients(sigma, sigma_next, SIGMAS[1], 0.8, "cps")
        mean = q.a * ((1 - sigma) * clean + sigma * noise) + q.b * (noise - clean)
        kept = math.sqrt(sigma_next**2 - q.s**2)
        torch.testing.assert_close(mean, (1 - sigma_next) * clean + kept * noise, rtol=1e-12, atol=1e-12)


def test_a_first_sigma_that_misses_one_by_rounding_counts_as_one() -> None:
    exact = step_coefficients(1.0, 0.9, 0.9, 0.7, "sde")
    for miss in (1e-7, 1e-5):
        near = step_coefficients(1.0 - miss, 0.9, 0.9, 0.7, "sde")
        assert near == pytest.approx(exact, rel=1e-3)
    # The planted fault: S = 1 - sigma as it stands.
    assert 0.7 * math.sqrt((1 - 1e-5) / 1e-5) * math.sqrt(0.1) > 40 * exact.s
    # Beyond the tolerance the published S holds, also in a schedule so dense that its sigmas crowd at one.
    assert step_coefficients(0.98, 0.9, 0.9, 0.7, "sde").s == pytest.approx(0.7 * math.sqrt(0.98 / 0.02 * 0.08))
    assert step_coefficients(0.99995, 0.9, 0.99999, 0.7, "sde").s == pytest.approx(
        0.7 * math.sqrt(0.99995 / 0.00005 * 0.09995)
    )


@pytest.mark.parametrize("kl_variance", ["transition", "flow_grpo"])
def test_table_holds_one_row_a_step_in_float64(kl_variance: str) -> None:
    table = coefficient_table(SCHEDULE, "sde", 0.7, kl_variance)
    assert table.dtype == torch.float64 and table.shape == (10, 6)
    for step, row in enumerate(table.tolist()):
        expected = step_coefficients(SIGMAS[step], SIGMAS[step + 1], SIGMAS[1], 0.7, "sde", kl_variance)
        assert StepCoefficients(*row) == expected
    ode = coefficient_table(SCHEDULE, "ode", 0.0)
    assert torch.isnan(ode[:, 3:]).all() and torch.isfinite(ode[:, :3]).all()


def test_a_step_without_noise_has_no_log_prob() -> None:
    cps = coefficient_table(SCHEDULE, "cps", 0.8)
    require_log_prob(cps, range(9))
    require_log_prob(coefficient_table(SCHEDULE, "sde", 0.7), range(10))
    with pytest.raises(ValueError, match=r"steps \[9\] have no log-prob"):
        require_log_prob(cps, (8, 9))
    with pytest.raises(ValueError, match=r"steps \[0, 1\] have no log-prob"):
        require_log_prob(coefficient_table(SCHEDULE, "sde", 0.0), (0, 1))
    with pytest.raises(ValueError, match=r"steps \[2\] have no log-prob"):
        require_log_prob(coefficient_table(SCHEDULE, "ode", 0.7), (2,))
    for outside in (10, -1):
        with pytest.raises(ValueError, match="outside the schedule"):
            require_log_prob(cps, (outside,))


def test_noise_that_drowns_in_rounding_has_no_log_prob() -> None:
    faint = step_coefficients(SIGMAS[4], SIGMAS[5], SIGMAS[1], 1e-5, "sde")
    assert 0 < faint.s < 1e-4 and math.isnan(faint.w) and math.isnan(faint.k)


def test_conventions_are_named() -> None:
    assert log_prob_convention("sde") == log_prob_convention("dance_sde") == "normalized"
    assert log_prob_convention("cps") == "flow_grpo_cps"
    with pytest.raises(ValueError, match="no log-prob"):
        log_prob_convention("ode")
    with pytest.raises(ValueError, match="unknown sde_type 'euler'"):
        log_prob_convention("euler")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.9, 0.8, 0.9, 0.7, "SDE"), "unknown sde_type 'SDE'"),
        ((0.9, 0.8, 0.9, 0.7, "sde", "exact"), "unknown kl_variance 'exact'"),
        ((0.8, 0.9, 0.9, 0.7, "sde"), "a step goes down"),
        ((0.8, 0.8, 0.9, 0.7, "sde"), "a step goes down"),
        ((1.1, 0.8, 0.9, 0.7, "sde"), "a step goes down"),
        ((float("nan"), 0.8, 0.9, 0.7, "sde"), "a step goes down"),
        ((0.9, 0.8, 0.9, -0.7, "sde"), "noise_level=-0.7"),
        ((0.9, 0.8, 0.9, float("nan"), "sde"), "noise_level=nan"),
        ((0.9, 0.8, 0.9, 1.2, "cps"), "noise_level=1.2 is above 1"),
        ((1.0, 0.8, 1.0, 0.7, "sde"), r"pass sigmas\[1\]"),
    ],
)
def test_impossible_requests_are_refused(arguments: tuple[float | str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_coefficients(*arguments)  # type: ignore[arg-type]


def test_the_last_step_of_a_single_step_schedule_uses_sigma_zero() -> None:
    schedule = Schedule(torch.tensor([1.0, 0.0]), torch.tensor([1000.0]))
    assert coefficient_table(schedule, "sde", 0.7)[0, 2] == pytest.approx(0.7)
