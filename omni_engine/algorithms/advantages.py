# SPDX-License-Identifier: Apache-2.0
"""Advantages relative to the other samples of the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

STD_KINDS = ("batch", "group", "none")

# A spread of this part of the largest reward is rounding: rewards that are equal but were summed in another order.
ROUNDING_SPREAD = 2.0**-44


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    valid: Tensor,
    *,
    std: str,
    unbiased: bool = True,
    epsilon: float = 1e-4,
    std_floor: float = 0.0,
    clip: float = 5.0,
) -> Tensor:
    """(reward - mean of its group) / (std + epsilon), clamped to [-clip, clip]; float64 [N].

    rewards: float64 [N] of the whole iteration. groups: int64 [N]. valid: bool [N]; the others are left out of means
        and stds and get 0; so does the only valid sample of a group, which is its own mean.
    std: of all valid rewards (`batch`), of the sample's group (`group`), or no division (`none`, epsilon unused).
    unbiased: divide the variance by n - 1 rather than n.
    std_floor: a std below it counts as no spread at all: its samples get 0. So does a spread of rounding size.

    Raises TypeError for other dtypes, ValueError for unequal lengths, an unknown `std`, or a valid reward that is not
    finite.
    """
    _check(rewards, groups, valid, std)
    values = torch.where(valid, rewards, 0.0)
    slots, slot = torch.unique(groups, return_inverse=True)
    centred, group_std = _centre(values, slot, valid, len(slots), unbiased)
    if std == "none":
        advantages = centred
    else:
        spread = group_std[slot]
        if std == "batch":
            spread = _centre(values, torch.zeros_like(slot), valid, 1, unbiased)[1].expand_as(centred)
        flat = (spread == 0) | (spread < std_floor)
        advantages = torch.where(flat, 0.0, centred / torch.where(flat, 1.0, spread + epsilon))
    return torch.where(valid, advantages, 0.0).clamp(-clip, clip)


def _centre(values: Tensor, slot: Tensor, valid: Tensor, num_slots: int, unbiased: bool) -> tuple[Tensor, Tensor]:
    """Values minus the mean of their slot [N], and the std of those differences [slots]; 0 where they are rounding.

    Equal rewards leave differences of rounding size, whose quotient by their own std would be of order 1.
    """

    def total(summands: Tensor) -> Tensor:
        return values.new_zeros(num_slots).index_add(0, slot, torch.where(valid, summands, 0.0))

    count = total(torch.ones_like(values))
    centred = values - (total(values) / count.clamp(min=1.0))[slot]
    degrees = (count - 1.0 if unbiased else count).clamp(min=1.0)
    std = (total(centred.square()) / degrees).sqrt()
    largest = values.new_zeros(num_slots).scatter_reduce(0, slot, torch.where(valid, values.abs(), 0.0), "amax")
    rounding = std <= ROUNDING_SPREAD * largest
    return torch.where(rounding[slot], 0.0, centred), torch.where(rounding, 0.0, std)


def _check(rewards: Tensor, groups: Tensor, valid: Tensor, std: str) -> None:
    if std not in STD_KINDS:
        raise ValueError(f"unknown advantage std {std!r}: choose one of {', '.join(STD_KINDS)}")
    for name, value, dtype in (
        ("rewards", rewards, torch.float64),
        ("groups", groups, torch.int64),
        ("valid", valid, torch.bool),
    ):
        if value.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, got {value.dtype}")
        if value.shape != (len(rewards),):
            raise ValueError(f"{name} must be [N={len(rewards)}], one a sample, got {list(value.shape)}")
    faulty = (valid & ~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if faulty:
        raise ValueError(
            f"{len(faulty)} rewards are not finite: positions {faulty[:8]} (groups {groups[faulty[:8]].tolist()}): a "
            "scorer that cannot score returns a Failure, which masks the sample"
        )
