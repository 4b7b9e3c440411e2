# SPDX-License-Identifier: Apache-2.0
"""Invariant: the Gaussian step's value, log-prob, KL and gradients are the published ones, in any batch the same bits.

Oracles: the peers' float32 figures in tests/golden (values and gradients to 1e-5), a float64 evaluation of the same
formula, and gradients written out by hand. Not covered: other devices.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from omni_engine.flow import Schedule, coefficient_table, require_log_prob
from omni_engine.ops import gaussian_kl, gaussian_log_prob, gaussian_mean, gaussian_step

pytestmark = pytest.mark.fast

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "sde_steps.safetensors")
SCHEDULE = Schedule(GOLDEN["sigmas"], GOLDEN["timesteps"])
RUNS = [("sde", 0.7), ("sde", 1.2), ("cps", 0.8), ("dance_sde", 0.3)]
CASES = [(*run, step) for run in RUNS for step in (0, 1, 4, 8, 9) if (run[0], step) != ("cps", 9)]


def golden(sde_type: str, noise_level: float, step: int, name: str) -> Tensor:
    return GOLDEN[f"{sde_type}.nl{noise_level}.step{step}.{name}"]


def coefficients(sde_type: str, noise_level: float, step: int, batch: int = 3, kl: str = "transition") -> Tensor:
    return coefficient_table(SCHEDULE, sde_type, noise_level, kl)[step].expand(batch, 6)


def assert_golden(ours: Tensor, peer: Tensor) -> None:
    torch.testing.assert_close(ours, peer.to(ours.dtype), rtol=1e-5, atol=1e-6)


def draw(seed: int = 0, batch: int = 5, tokens: int = 7, channels: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, tokens, channels, generator=generator) for _ in range(3)]


@pytest.mark.parametrize(("sde_type", "noise_level", "step"), CASES)
def test_equals_the_peers_figures(sde_type: str, noise_level: float, step: int) -> None:
    case = sde_type, noise_level, step
    x, v, x_next = golden(*case, "x"), golden(*case, "v").requires_grad_(), golden(*case, "x_next")
    step_result, _ = gaussian_step(x, golden(*case, "v_old"), golden(*case, "noise"), coefficients(*case))
    assert_golden(step_result, x_next)
    log_prob = gaussian_log_prob(x, v, x_next, coefficients(*case))
    assert_golden(log_prob, golden(*case, "log_prob"))
    (log_prob * golden(*case, "log_prob_cotangent")).sum().backward()
    assert v.grad is not None
    assert_golden(v.grad, golden(*case, "grad_v"))
    # atol is of the order of such gradients: hold them to their own scale as well.
    assert (v.grad - golden(*case, "grad_v")).abs().max() < 1e-5 * golden(*case, "grad_v").abs().max()
    without_constant = coefficients(*case).clone()
    without_constant[:, 4] = 0.0
    log_prob = gaussian_log_prob(x, v, x_next, without_constant)
    assert_golden(log_prob, golden(*case, "log_prob_no_normalizer"))


@pytest.mark.parametrize(("sde_type", "noise_level", "step"), CASES)
def test_mean_and_std_are_the_peers(sde_type: str, noise_level: float, step: int) -> None:
    case = sde_type, noise_level, step
    a, b, s, *_ = coefficients(*case)[0].tolist()
    assert_golden(a * golden(*case, "x").double() + b * golden(*case, "v").double(), golden(*case, "mean"))
    std = golden(*case, "std_dev_t").flatten() * (golden(*case, "sqrt_dt") if sde_type == "sde" else 1.0)
    assert_golden(torch.full((3,), s, dtype=torch.float64), std)


@pytest.mark.parametrize(("sde_type", "noise_level", "step"), CASES)
def test_kl_is_the_peers_under_their_variance(sde_type: str, noise_level: float, step: int) -> None:
    """The peers form it from means: mean((mean - mean_ref)^2) / (2 std_dev_t^2); their std_dev_t is the golden one."""
    case = sde_type, noise_level, step
    x, v, v_ref = golden(*case, "x"), golden(*case, "v"), golden(*case, "v_old")
    rows = coefficients(*case, kl="flow_grpo")
    means = [rows[0, 0] * x.double() + rows[0, 1] * velocity.double() for velocity in (v, v_ref)]
    std_dev = golden(*case, "std_dev_t").double()
    expected = ((means[0] - means[1]).square() / (2 * std_dev**2)).mean(dim=(1, 2))
    torch.testing.assert_close(gaussian_kl(v, v_ref, rows), expected, rtol=1e-5, atol=1e-9)


def test_the_peers_number_for_a_step_without_noise_is_refused() -> None:
    """They return a finite log-prob for the last cps step; it is the square of rounding."""
    assert torch.isfinite(golden("cps", 0.8, 9, "log_prob")).all()
    table = coefficient_table(SCHEDULE, "cps", 0.8)
    with pytest.raises(ValueError, match=r"steps \[9\] have no log-prob"):
        require_log_prob(table, [9])
    x, v, noise = (golden("cps", 0.8, 9, name) for name in ("x", "v_old", "noise"))
    x_next, log_prob = gaussian_step(x, v, noise, table[9].expand(3, 6))
    assert_golden(x_next, golden("cps", 0.8, 9, "x_next"))  # the step itself is fine
    assert torch.isnan(log_prob).all()  # and its log-prob can never be taken for a number


@pytest.mark.parametrize(("sde_type", "noise_level", "step"), CASES)
def test_step_and_replay_agree_in_every_bit(sde_type: str, noise_level: float, step: int) -> None:
    x, v, noise = draw()
    rows = coefficients(sde_type, noise_level, step, batch=5)
    x_next, log_prob = gaussian_step(x, v, noise, rows)
    assert x_next.dtype == torch.float32 and log_prob.dtype == torch.float64
    assert torch.equal(gaussian_log_prob(x, v.clone().requires_grad_(), x_next.clone(), rows), log_prob)


def test_a_sample_gets_the_same_bits_in_every_batch_and_thread_count() -> None:
    x, v, noise = draw(batch=6, tokens=613, channels=64)  # 39,232 elements: torch.sum would split them over threads
    rows = coefficient_table(SCHEDULE, "cps", 0.8)[:6]  # log_prob = -mean of squares: no constant hides a last bit
    x_next, log_prob = gaussian_step(x, v, noise, rows)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for part in ([0], [1], [2], [3], [4], [5], [1, 2], [4, 3, 0], [2, 2]):
                pieces = gaussian_step(x[part], v[part], noise[part], rows[part])
                assert torch.equal(pieces[0], x_next[part]) and torch.equal(pieces[1], log_prob[part])
    finally:
        torch.set_num_threads(threads)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    assert torch.equal(gaussian_log_prob(strided, v, x_next, rows), log_prob)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (5, 13), (8, 64), (31, 33)])
@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
def test_value_and_gradient_equal_the_formula_in_float64(shape: tuple[int, int], sde_type: str) -> None:
    x, v, noise = draw(1, 4, *shape)
    rows = coefficient_table(SCHEDULE, sde_type, 0.4)[[0, 3, 5, 8]]
    x_next, _ = gaussian_step(x, v, noise, rows)
    moved = (v + 0.01 * noise.flip(0)).requires_grad_()
    cotangent = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    log_prob = gaussian_log_prob(x, moved, x_next, rows)
    (log_prob * cotangent).sum().backward()

    a, b, _, w, c, _ = (column.view(-1, 1, 1) for column in rows.unbind(1))
    difference = x_next.double() - (a * x.double() + b * moved.detach().double())
    expected = c.flatten() - w.flatten() * difference.square().mean(dim=(1, 2))
    torch.testing.assert_close(log_prob.detach(), expected, rtol=1e-5, atol=1e-6)
    factor = cotangent.view(-1, 1, 1) * 2 * w * b / (shape[0] * shape[1])
    assert moved.grad is not None
    # The difference of two float32 latents is good to a few roundings of the latents, however small it is itself.
    rounding = 2**-22 * torch.maximum(x.abs().amax(), x_next.abs().amax())
    assert (moved.grad / factor - difference).abs().max() < rounding


def test_bfloat16_velocity_is_upcast_and_its_gradient_rounded_once() -> None:
    x, v, noise = draw()
    rows = coefficients("sde", 0.7, 4, batch=5)
    narrow = v.bfloat16().requires_grad_()
    wide = v.bfloat16().float().requires_grad_()
    x_next, log_prob = gaussian_step(x, narrow.detach(), noise, rows)
    assert torch.equal(gaussian_log_prob(x, wide, x_next, rows), log_prob)
    for term in (lambda u: gaussian_log_prob(x, u, x_next, rows), lambda u: gaussian_kl(u, noise, rows)):
        narrow.grad = wide.grad = None
        for velocity in (narrow, wide):
            term(velocity).sum().backward()
        assert narrow.grad is not None and wide.grad is not None and narrow.grad.dtype == torch.bfloat16
        assert torch.equal(narrow.grad, wide.grad.bfloat16())


def test_x_next_is_a_constant_of_the_log_prob() -> None:
    x, v, noise = draw()
    rows = coefficients("sde", 0.7, 4, batch=5)
    velocity = v.clone().requires_grad_()
    x_next, _ = gaussian_step(x, velocity, noise, rows)  # carries a graph, as a careless caller would hand it over
    gaussian_log_prob(x, velocity, x_next, rows).sum().backward()
    assert velocity.grad is not None and velocity.grad.abs().max() > 0


def test_kl_is_zero_at_the_reference_and_its_gradient_is_right() -> None:
    _, v, v_ref = draw()
    rows = coefficient_table(SCHEDULE, "sde", 0.7)[[0, 1, 2, 3, 9]]
    assert torch.equal(gaussian_kl(v, v, rows), torch.zeros(5, dtype=torch.float64))
    velocity = v.clone().requires_grad_()
    kl = gaussian_kl(velocity, v_ref, rows)
    kl.sum().backward()
    expected = rows[:, 5] * (v.double() - v_ref.double()).square().mean(dim=(1, 2))
    torch.testing.assert_close(kl.detach(), expected, rtol=1e-6, atol=0)
    gradient = rows[:, 5].view(-1, 1, 1) * 2 / 63 * (v.double() - v_ref.double())
    assert velocity.grad is not None
    torch.testing.assert_close(velocity.grad.double(), gradient, rtol=1e-5, atol=1e-9)


def test_an_ode_row_is_the_euler_step_beside_sde_rows() -> None:
    x, v, noise = draw(batch=2)
    rows = torch.stack([coefficient_table(SCHEDULE, "ode", 0.0)[4], coefficient_table(SCHEDULE, "sde", 0.7)[4]])
    x_next, log_prob = gaussian_step(x, v, noise, rows)
    euler = x[0] + (SCHEDULE.sigmas[5] - SCHEDULE.sigmas[4]) * v[0]
    torch.testing.assert_close(x_next[0], euler, rtol=1e-6, atol=1e-6)
    assert torch.isnan(log_prob[0]) and torch.isfinite(log_prob[1])
    assert torch.equal(gaussian_mean(x, v, rows)[0], x_next[0])  # a deterministic step needs no noise drawn


def test_an_empty_batch_gives_empty_results() -> None:
    empty = torch.zeros(0, 7, 9)
    x_next, log_prob = gaussian_step(empty, empty, empty, torch.zeros(0, 6, dtype=torch.float64))
    assert x_next.shape == (0, 7, 9) and log_prob.shape == (0,)
    assert gaussian_kl(empty, empty, torch.zeros(0, 6, dtype=torch.float64)).shape == (0,)


def test_sixteen_bit_latents_and_unfitting_arguments_are_refused() -> None:
    x, v, noise = draw()
    rows = coefficients("sde", 0.7, 4, batch=5)
    for dtype in (torch.bfloat16, torch.float16):
        for call in (
            lambda narrow: gaussian_step(narrow, v, noise, rows),
            lambda narrow: gaussian_mean(narrow, v, rows),
        ):
            with pytest.raises(TypeError, match="x must be float32"):
                call(x.to(dtype))
        with pytest.raises(TypeError, match="x_next must be float32"):
            gaussian_log_prob(x, v, noise.to(dtype), rows)
    with pytest.raises(TypeError, match=r"coefficients must be float64 \[B=5, 6\]"):
        gaussian_step(x, v, noise, rows.float())
    with pytest.raises(TypeError, match=r"coefficients must be float64 \[B=5, 6\]"):
        gaussian_log_prob(x, v, noise, rows[:1])
    with pytest.raises(ValueError, match="velocity's shape"):
        gaussian_log_prob(x[:, :3], v, noise, rows)
    with pytest.raises(ValueError, match="velocity's shape"):
        gaussian_kl(v, noise[:, :3], rows)
    with pytest.raises(ValueError, match=r"\[B, I, C\]"):
        gaussian_log_prob(x[0], v[0], noise[0], rows[:1].expand(7, 6))
