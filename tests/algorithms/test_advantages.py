# SPDX-License-Identifier: Apache-2.0
"""Invariant: an advantage is a sample's reward against its own group, on a scale that rounding cannot set.

Oracles: the peers' figures in tests/golden and a plain loop in Python. Not covered: how a reward is masked, and the
gathering of rewards from several ranks.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from omni_engine.algorithms import build_algorithm
from omni_engine.algorithms.advantages import group_advantages
from omni_engine.arguments.algorithm import AlgorithmSettings

pytestmark = pytest.mark.fast

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "advantages.safetensors")


def advantages(rewards: list[float], groups: list[int], valid: list[bool] | None = None, **settings: Any) -> Tensor:
    mask = torch.tensor(valid if valid is not None else [True] * len(rewards), dtype=torch.bool)
    settings = {"std": "group"} | settings
    values, slots = torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64)
    return group_advantages(values, slots, mask, **settings)


def plain_loop(
    rewards: list[float], groups: list[int], valid: list[bool], std: str, unbiased: bool, epsilon: float, clip: float
) -> list[float]:
    kept = [(reward, group) for reward, group, ok in zip(rewards, groups, valid, strict=True) if ok]
    spread = statistics.stdev if unbiased else statistics.pstdev
    result = []
    for reward, group, ok in zip(rewards, groups, valid, strict=True):
        own = [other for other, slot in kept if slot == group]
        if not ok or len(own) < 2:
            result.append(0.0)
            continue
        scale = {"none": 1.0, "group": spread(own) + epsilon, "batch": spread([r for r, _ in kept]) + epsilon}[std]
        result.append(max(-clip, min(clip, (reward - statistics.fmean(own)) / scale)))
    return result


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("global_std=True.norm_by_std=True", "batch"),
        ("global_std=False.norm_by_std=True", "group"),
        ("global_std=True.norm_by_std=False", "none"),
        ("global_std=False.norm_by_std=False", "none"),
    ],
)
def test_equals_the_peers_figures(name: str, std: str) -> None:
    algorithm = build_algorithm(AlgorithmSettings(advantage_std=std))
    ours = algorithm.advantages(GOLDEN["rewards"].double(), GOLDEN["group"], torch.ones(12, dtype=torch.bool))
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, GOLDEN[f"adv.{name}"].double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("std", ["batch", "group", "none"])
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_loop_with_masked_samples(std: str, unbiased: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(40, generator=generator, dtype=torch.float64).tolist()
    groups = torch.randint(0, 9, (40,), generator=generator).tolist()  # uneven, unsorted, some of one sample
    valid = (torch.rand(40, generator=generator) < 0.7).tolist()
    expected = plain_loop(rewards, groups, valid, std, unbiased, 1e-4, 1.2)
    ours = advantages(rewards, groups, valid, std=std, unbiased=unbiased, clip=1.2)
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_settings_reach_the_computation() -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 0.2, 0.4], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    settings = AlgorithmSettings(
        advantage_std="group",
        advantage_std_unbiased=False,
        advantage_epsilon=0.0,
        advantage_std_floor=0.2,
        advantage_clip=0.75,
    )
    ours = build_algorithm(settings).advantages(rewards, groups, torch.ones(4, dtype=torch.bool))
    assert ours.tolist() == [-0.75, 0.75, 0.0, 0.0]  # clamped; std 0.1 is below the floor


@pytest.mark.parametrize("std", ["batch", "group", "none"])
@pytest.mark.parametrize("value", [0.35, 0.1, 1 / 3, 1e9 + 0.1])
def test_equal_rewards_give_exactly_zero(std: str, value: float) -> None:
    ours = advantages([value] * 7, [0] * 7, std=std, epsilon=0.0)
    assert torch.equal(ours, torch.zeros(7, dtype=torch.float64))


def test_plain_formulas_would_have_blown_rounding_up() -> None:
    """The planted faults: a std of rounding size under deviations of rounding size, and E[x^2] - E[x]^2 in float32."""
    rewards = torch.tensor([0.35] * 7, dtype=torch.float64)
    deviation = rewards - rewards.mean()
    assert 0 < deviation.abs().max() < 1e-15 and (deviation / rewards.std()).abs().max() > 0.9
    single = rewards.float()
    assert (single.square().mean() - single.mean().square()).sqrt() > 1e-4  # a spread that would outgrow epsilon


def test_rewards_that_differ_by_rounding_count_as_equal() -> None:
    sums = [0.1 + 0.2, 0.3, 0.3, 0.15 + 0.15]
    assert len(set(sums)) == 2
    for std in ("batch", "group"):
        assert advantages(sums, [0] * 4, std=std, epsilon=0.0).abs().max() == 0


def test_a_small_true_spread_is_kept_unless_below_the_floor() -> None:
    rewards = [0.35] * 7 + [0.350001]
    kept = advantages(rewards, [0] * 8, epsilon=0.0)
    assert kept[-1] == pytest.approx(7 / math.sqrt(8), rel=1e-6)  # the largest z-score of 8 values
    assert advantages(rewards, [0] * 8, epsilon=0.0, std_floor=1e-6).abs().max() == 0
    assert advantages(rewards, [0] * 8, epsilon=1e-4)[-1] < 0.01


def test_a_group_without_spread_is_zero_beside_one_with_spread() -> None:
    for std in ("batch", "group", "none"):
        ours = advantages([0.25, 0.25, 0.25, 0.1, 0.9, 0.5], [7, 7, 7, 3, 3, 3], std=std)
        assert torch.equal(ours[:3], torch.zeros(3, dtype=torch.float64)) and ours[3] < 0 < ours[4]


def test_groups_of_one_and_masked_samples_get_zero_and_do_not_count() -> None:
    rewards = [0.1, 0.9, 0.4, float("nan"), 0.7, 0.3]
    valid = [True, True, True, False, True, False]
    groups = [0, 0, 1, 1, 2, 2]
    for std in ("batch", "group", "none"):
        ours = advantages(rewards, groups, valid, std=std)
        assert torch.isfinite(ours).all() and ours[2:].abs().max() == 0 and ours[0] == -ours[1] != 0
    # A masked reward moves nobody, whatever it is.
    other = [0.1, 0.9, 0.4, 100.0, 0.7, float("-inf")]
    assert torch.equal(advantages(other, groups, valid, std="batch"), advantages(rewards, groups, valid, std="batch"))


@pytest.mark.parametrize("std", ["batch", "group", "none"])
def test_nothing_valid_is_all_zero(std: str) -> None:
    assert advantages([float("nan")] * 3, [0, 0, 1], [False] * 3, std=std).abs().max() == 0
    assert advantages([], [], [], std=std).shape == (0,)


@pytest.mark.parametrize("std", ["batch", "group"])
def test_scale_shift_and_order_of_rewards_do_not_matter(std: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(24, generator=generator, dtype=torch.float64)
    groups = torch.arange(24) % 6
    valid = torch.ones(24, dtype=torch.bool)
    base = group_advantages(rewards, groups, valid, std=std, epsilon=0.0)
    shifted = group_advantages(1e6 + 3 * rewards, groups, valid, std=std, epsilon=0.0)
    torch.testing.assert_close(shifted, base, rtol=1e-8, atol=1e-8)  # E[x^2] - E[x]^2 would be off by 1e-4 here
    order = torch.randperm(24, generator=generator)
    permuted = group_advantages(rewards[order], groups[order] * 1000, valid, std=std, epsilon=0.0)
    torch.testing.assert_close(permuted, base[order], rtol=1e-13, atol=1e-13)
    for group in range(6):
        assert base[groups == group].sum().abs() < 1e-12


def test_advantages_are_clamped_on_both_sides() -> None:
    rewards = [0.0] * 30 + [1.0]
    assert advantages(rewards, [0] * 31, clip=5.0).max() == 5.0
    assert advantages([-r for r in rewards], [0] * 31, clip=5.0).min() == -5.0


def test_wrong_inputs_are_refused() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"positions \[1\] \(groups \[4\]\)"):
            advantages([0.5, value, 0.1], [4, 4, 4])
    rewards, groups, valid = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64), torch.ones(3) > 0
    with pytest.raises(TypeError, match=r"rewards must be torch\.float64"):
        group_advantages(rewards.float(), groups, valid, std="group")
    with pytest.raises(TypeError, match=r"valid must be torch\.bool"):
        group_advantages(rewards, groups, valid.long(), std="group")
    with pytest.raises(ValueError, match=r"groups must be \[N=3\]"):
        group_advantages(rewards, groups[:2], valid, std="group")
    with pytest.raises(ValueError, match="unknown advantage std 'global'"):
        group_advantages(rewards, groups, valid, std="global")
