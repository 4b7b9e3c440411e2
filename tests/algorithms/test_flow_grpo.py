# SPDX-License-Identifier: Apache-2.0
"""Invariant: the Flow-GRPO loss is a sum over decisions over a global count, and equals the peers' loss and gradient.

So any split of the same decisions over micro-batches and ranks adds up to the same loss, gradient and metrics. Oracles:
the peers' figures in tests/golden, gradients written out by hand. Not covered: the reduction over ranks itself.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from omni_engine.algorithms import ALGORITHMS, DecisionStats, LossOutput, build_algorithm
from omni_engine.arguments.algorithm import AlgorithmSettings
from omni_engine.ops import gaussian_kl

pytestmark = pytest.mark.fast

GOLDEN_FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = load_file(GOLDEN_FOLDER / "losses.safetensors")
FIGURES = json.loads((GOLDEN_FOLDER / "figures.json").read_text())["loss_metrics"]


def make_stats(decisions: int = 24, seed: int = 0, **changes: Any) -> DecisionStats:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(decisions, generator=generator, dtype=torch.float64)

    old = normal(0.3)
    values: dict[str, Any] = {
        "log_prob": (old + normal(2e-4)).requires_grad_(),
        "old_log_prob": old,
        "advantages": normal(1.0),
        "weights": torch.ones(decisions, dtype=torch.float64),
        "kl": normal(0.1).abs().requires_grad_(),
        "sample_ids": torch.arange(decisions) + 100,
    }
    return DecisionStats(**(values | changes))


def part_of(stats: DecisionStats, index: Tensor) -> DecisionStats:
    """Some of the decisions, as leaves of their own."""
    parts = {field.name: getattr(stats, field.name).detach()[index].clone() for field in fields(stats)}
    for name in ("log_prob", "kl"):
        parts[name].requires_grad_()
    return DecisionStats(**parts)


def gradient(stats: DecisionStats, name: str = "log_prob") -> Tensor:
    grad = getattr(stats, name).grad
    assert grad is not None
    return grad


def assert_golden(ours: Tensor, peer: Tensor) -> None:
    torch.testing.assert_close(ours, peer.to(ours.dtype).reshape(ours.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", ["1e-3", "1e-5"])
def test_loss_gradient_and_metrics_equal_the_peers(clip: str) -> None:
    name = f"flow_grpo.clip{float(clip)}"
    algorithm = build_algorithm(AlgorithmSettings(clip_range=float(clip)))
    stats = DecisionStats(
        log_prob=GOLDEN["log_prob"].double().requires_grad_(),
        old_log_prob=GOLDEN["old_log_prob"].double(),
        advantages=GOLDEN["advantages"].double(),  # one of them 9, beyond the clip of 5
        weights=torch.ones(8),
    )
    output = algorithm.loss(stats, 8)
    output.loss.backward()
    assert_golden(output.loss.detach(), GOLDEN[f"{name}.loss"])
    assert_golden(gradient(stats), GOLDEN[f"{name}.grad_log_prob"])
    metrics, peers = algorithm.metrics(output.sums, output.maxima), FIGURES[name]
    assert metrics["policy/loss"] == pytest.approx(float(GOLDEN[f"{name}.loss"]), rel=1e-5)
    assert metrics["policy/ratio_mean"] == pytest.approx(peers["actor/ratio_mean"], rel=1e-6)
    assert metrics["policy/ratio_std"] == pytest.approx(peers["actor/ratio_std"], rel=1e-5)
    assert metrics["policy/clip_fraction_high"] == peers["actor/pg_clipfrac_higher"]
    assert metrics["policy/clip_fraction_low"] == peers["actor/pg_clipfrac_lower"]
    assert metrics["policy/log_ratio_mean"] == pytest.approx(-peers["actor/ppo_kl"], rel=1e-5)
    assert 1 + metrics["policy/ratio_off_one_max"] == pytest.approx(1.0049703121185303, rel=1e-6)


def test_kl_loss_and_gradient_equal_the_peers() -> None:
    """Their KL is of means under 2 std_dev_t^2: ours with b = 1 and that k, which kl_variance=flow_grpo makes."""
    std_dev = GOLDEN["std_dev_t"].double().flatten()
    rows = torch.zeros(8, 6, dtype=torch.float64)
    rows[:, 5] = 1 / (2 * std_dev**2)
    mean = GOLDEN["mean"].requires_grad_()
    same = torch.zeros(8, dtype=torch.float64)
    algorithm = build_algorithm(AlgorithmSettings(kl_coef=1.0, kl_variance="flow_grpo"))
    assert algorithm.needs.reference
    kl = gaussian_kl(mean, GOLDEN["old_mean"], rows)
    output = algorithm.loss(DecisionStats(same.clone().requires_grad_(), same, same, torch.ones(8), kl), 8)
    output.loss.backward()
    torch.testing.assert_close(output.loss.detach().float(), GOLDEN["kl.loss"].reshape(()), rtol=1e-5, atol=0)
    assert mean.grad is not None
    assert_golden(mean.grad, GOLDEN["kl.grad_mean"])
    assert (mean.grad - GOLDEN["kl.grad_mean"]).abs().max() < 1e-5 * GOLDEN["kl.grad_mean"].abs().max()
    assert algorithm.metrics(output.sums)["policy/kl"] == pytest.approx(float(GOLDEN["kl.loss"]), rel=1e-5)


def test_gradient_is_minus_advantage_times_ratio_unless_clipped() -> None:
    log_ratio = torch.tensor([2e-4, 2e-4, -2e-4, -2e-4, 5e-5, 0.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0, -3.0], dtype=torch.float64)
    stats = DecisionStats(log_ratio.clone().requires_grad_(), torch.zeros(6).double(), advantages, torch.ones(6))
    build_algorithm(AlgorithmSettings(clip_range=1e-4)).loss(stats, 6).loss.backward()
    clipped = torch.tensor([True, False, False, True, False, False])  # already moved far enough the way it should
    expected = torch.where(clipped, 0.0, -advantages * log_ratio.exp() / 6)
    torch.testing.assert_close(gradient(stats), expected, rtol=1e-12, atol=1e-15)


def split_sum(stats: DecisionStats, parts: list[Tensor], count: float) -> tuple[Tensor, dict[str, Tensor], LossOutput]:
    """Loss and gradients of the parts, put together as accumulation and all-reduce would."""
    algorithm = build_algorithm(AlgorithmSettings(kl_coef=0.04))
    gradients = {name: torch.zeros(len(stats.weights), dtype=torch.float64) for name in ("log_prob", "kl")}
    outputs = []
    for index in parts:
        part = part_of(stats, index)
        outputs.append(algorithm.loss(part, count))
        outputs[-1].loss.backward()
        for name in gradients:
            gradients[name][index] = gradient(part, name)
    total = LossOutput(
        loss=torch.stack([output.loss.detach() for output in outputs]).sum(),
        sums={name: torch.stack([output.sums[name] for output in outputs]).sum() for name in outputs[0].sums},
        maxima={name: torch.stack([output.maxima[name] for output in outputs]).amax() for name in outputs[0].maxima},
    )
    return total.loss, gradients, total


@pytest.mark.parametrize("pieces", [1, 2, 3, 7, 24])
def test_any_split_gives_the_same_loss_gradient_and_metrics(pieces: int) -> None:
    stats = make_stats()
    weights = torch.ones(24, dtype=torch.float64)
    weights[[3, 8, 9, 10, 11]] = 0.0  # one micro-batch of some splits is masked altogether
    stats = replace(stats, weights=weights)
    count = float(weights.sum())
    whole = split_sum(stats, [torch.arange(24)], count)
    order = torch.arange(24) if pieces % 2 else torch.randperm(24, generator=torch.Generator().manual_seed(1))
    parts = [*order.tensor_split(pieces), torch.zeros(0, dtype=torch.int64)]  # and an empty micro-batch
    split = split_sum(stats, parts, count)
    torch.testing.assert_close(split[0], whole[0], rtol=1e-12, atol=0)
    for name in ("log_prob", "kl"):
        assert torch.equal(split[1][name], whole[1][name])
    algorithm = build_algorithm(AlgorithmSettings(kl_coef=0.04))
    expected = algorithm.metrics(whole[2].sums, whole[2].maxima)
    assert algorithm.metrics(split[2].sums, split[2].maxima) == pytest.approx(expected, rel=1e-9)


def test_a_loss_averaged_by_micro_batch_would_depend_on_the_split() -> None:
    """The planted fault: uneven micro-batches, each divided by its own count."""
    stats, index = make_stats(), torch.arange(24)
    parts = [index[:5], index[5:]]
    algorithm = build_algorithm(AlgorithmSettings())
    whole = algorithm.loss(part_of(stats, index), 24).loss
    averaged = torch.stack([algorithm.loss(part_of(stats, part), len(part)).loss for part in parts]).mean()
    assert (averaged - whole).abs() > 1e-3


def test_metrics_are_the_statistics_of_the_ratio() -> None:
    stats = make_stats(200)
    algorithm = build_algorithm(AlgorithmSettings(clip_range=1e-4, kl_coef=0.04))
    output = algorithm.loss(stats, 200)
    ratio = (stats.log_prob - stats.old_log_prob).exp().detach()
    metrics = algorithm.metrics(output.sums, output.maxima)
    assert metrics["policy/loss"] == pytest.approx(float(output.loss.detach()))
    assert metrics["policy/loss"] == pytest.approx(metrics["policy/policy_loss"] + 0.04 * metrics["policy/kl"])
    assert metrics["policy/ratio_mean"] - 1 == pytest.approx(float((ratio - 1).mean()), rel=1e-9)
    assert metrics["policy/ratio_std"] == pytest.approx(float(ratio.std()), rel=1e-9)
    assert metrics["policy/clip_fraction_high"] == float((ratio > 1 + 1e-4).double().mean()) > 0
    assert metrics["policy/clip_fraction_low"] == float((ratio < 1 - 1e-4).double().mean()) > 0
    assert metrics["policy/ratio_off_one_max"] == pytest.approx(float((ratio - 1).abs().max()), rel=1e-9)
    assert not any(value.requires_grad for value in (*output.sums.values(), *output.maxima.values()))


def test_equal_log_probs_report_a_ratio_of_exactly_one() -> None:
    stats = make_stats()
    stats = replace(stats, log_prob=stats.old_log_prob.clone().requires_grad_())
    algorithm = build_algorithm(AlgorithmSettings())
    output = algorithm.loss(stats, 24)
    output.loss.backward()
    metrics = algorithm.metrics(output.sums, output.maxima)
    assert metrics["policy/ratio_mean"] == 1.0 and metrics["policy/ratio_std"] == 0.0
    assert metrics["policy/ratio_off_one_max"] == 0.0
    torch.testing.assert_close(gradient(stats), -stats.advantages / 24, rtol=1e-15, atol=0)


def test_masked_decisions_count_for_nothing_whatever_they_hold() -> None:
    stats = make_stats()
    weights = torch.ones(24)
    weights[5] = 0.0
    poison = {name: getattr(stats, name).detach().clone() for name in ("log_prob", "old_log_prob", "advantages", "kl")}
    for value in poison.values():
        value[5] = float("nan")
    for name in ("log_prob", "kl"):
        poison[name].requires_grad_()
    algorithm = build_algorithm(AlgorithmSettings(kl_coef=0.04))
    masked = replace(stats, weights=weights, **poison)
    output = algorithm.loss(masked, 23)
    output.loss.backward()
    keep = torch.tensor([i for i in range(24) if i != 5])
    expected = part_of(stats, keep)
    expected_output = algorithm.loss(expected, 23)
    expected_output.loss.backward()
    torch.testing.assert_close(output.loss, expected_output.loss, rtol=1e-13, atol=0)
    assert gradient(masked)[5] == 0 and torch.equal(gradient(masked)[keep], gradient(expected))
    assert algorithm.metrics(output.sums) == pytest.approx(algorithm.metrics(expected_output.sums), rel=1e-12)


def test_an_empty_micro_batch_is_zero_and_has_the_same_keys() -> None:
    algorithm = build_algorithm(AlgorithmSettings())
    full = algorithm.loss(make_stats(), 24)
    empty = algorithm.loss(make_stats(0), 24)
    empty.loss.backward()
    assert empty.loss.detach() == 0.0
    assert list(empty.sums) == list(full.sums) and list(empty.maxima) == list(full.maxima)
    assert algorithm.metrics(empty.sums, empty.maxima) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("log_prob", float("nan")),
        ("log_prob", 1e4),  # exp overflows
        ("old_log_prob", float("-inf")),
        ("kl", float("inf")),
        ("advantages", float("nan")),
    ],
)
def test_a_decision_that_is_not_finite_is_refused_with_its_sample(name: str, value: float) -> None:
    stats = make_stats()
    faulty = getattr(stats, name).detach().clone()
    faulty[7] = value
    with pytest.raises(ValueError, match=r"decision 7 \(sample 107\) is not finite"):
        build_algorithm(AlgorithmSettings()).loss(replace(stats, **{name: faulty}), 24)
    with pytest.raises(ValueError, match="decision 7 is not finite"):
        build_algorithm(AlgorithmSettings()).loss(replace(stats, **{name: faulty}, sample_ids=None), 24)


def test_unfitting_statistics_are_refused() -> None:
    stats = make_stats()
    for name in ("log_prob", "old_log_prob", "kl"):
        with pytest.raises(TypeError, match=f"{name} must be float64"):
            replace(stats, **{name: getattr(stats, name).detach().bfloat16()})
    for name in ("old_log_prob", "advantages", "weights", "kl", "sample_ids"):
        with pytest.raises(ValueError, match=rf"{name} must be \[D=24\]"):
            replace(stats, **{name: getattr(stats, name)[:1]})
    for count in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="must be skipped"):
            build_algorithm(AlgorithmSettings()).loss(stats, count)
    with pytest.raises(ValueError, match=r"needs DecisionStats\.kl"):
        build_algorithm(AlgorithmSettings(kl_coef=0.04)).loss(replace(stats, kl=None), 24)


def test_registry_and_flag_name_the_same_algorithms() -> None:
    assert not build_algorithm(AlgorithmSettings()).needs.reference
    for name in ALGORITHMS:
        build_algorithm(AlgorithmSettings(algorithm=name))
    with pytest.raises(ValueError, match="unknown algorithm 'ppo': choose one of flow_grpo"):
        build_algorithm(replace(AlgorithmSettings(), algorithm="ppo"))
