# SPDX-License-Identifier: Apache-2.0
"""Six float64 numbers a denoising step: the only place that knows what an SDE type is.

Every step is an affine Gaussian: mean = a x + b v, x_next = mean + s noise, log_prob = c - w mean((x_next - mean)^2),
kl = k mean((v - v_ref)^2). Sources: Flow-GRPO (arXiv:2505.05470) for `sde`, DanceGRPO (arXiv:2505.07818) for
`dance_sde`, Coefficients-Preserving Sampling (arXiv:2509.05952) for `cps`; the peers' code for the sigma = 1 case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from omni_engine.flow.schedule import Schedule

SDE_TYPES = ("sde", "cps", "dance_sde", "ode")
KL_VARIANCES = ("transition", "flow_grpo")

# `sde` divides by 1 - sigma. A first sigma that misses 1 by rounding (0.99999) would give a noise scale of 49 where
# sigma = 1 gives 0.7, so "is 1" is a comparison with a tolerance.
SIGMA_ONE_TOLERANCE = 1e-4
# Below this noise scale x_next - mean is float32 rounding, not noise: its log-prob means nothing.
MIN_NOISE_SCALE = 1e-4


class StepCoefficients(NamedTuple):
    """The six coefficients of a step. w, c and k are nan where the step has no log-prob."""

    a: float
    b: float
    s: float
    w: float
    c: float
    k: float


def step_coefficients(
    sigma: float,
    sigma_next: float,
    sigma_max: float,
    noise_level: float,
    sde_type: str,
    kl_variance: str = "transition",
) -> StepCoefficients:
    """The coefficients of the step sigma -> sigma_next (0 <= sigma_next < sigma <= 1).

    sigma_max: stands in for sigma where sigma is 1 in the variance of `sde`; pass the schedule's sigmas[1].
    noise_level: eta, >= 0 (at most 1 for `cps`); `ode` has no noise and ignores it.
    kl_variance: what the KL divides by (twice its square): `transition` the step's own std s, which is the KL of the
        two Gaussians; `flow_grpo` std_dev_t = s / sqrt(-dt) for `sde` (and s otherwise), as the peers do.

    A step with s below MIN_NOISE_SCALE (the last `cps` step, eta = 0, `ode`) gets nan for w, c and k.
    Raises ValueError for an unknown name or a value out of range.
    """
    _check_request(sigma, sigma_next, noise_level, sde_type, kl_variance)
    dt = sigma_next - sigma
    std_dev = math.nan
    if sde_type == "ode":
        a, b, s = 1.0, dt, 0.0
    elif sde_type == "sde":
        distance = _distance_from_one(sigma, sigma_max)
        drift = noise_level**2 / (2.0 * distance)
        a, b = 1.0 + drift * dt, (1.0 + drift * (1.0 - sigma)) * dt
        std_dev = noise_level * math.sqrt(sigma / distance)
        s = std_dev * math.sqrt(-dt)
    elif sde_type == "dance_sde":
        drift = noise_level**2 / (2.0 * sigma)
        a, b = 1.0 + drift * dt, (1.0 + drift * (1.0 - sigma)) * dt
        std_dev = s = noise_level * math.sqrt(-dt)
    else:
        kept, drawn = math.cos(noise_level * math.pi / 2.0), math.sin(noise_level * math.pi / 2.0)
        a = (1.0 - sigma_next) + sigma_next * kept
        b = -sigma * (1.0 - sigma_next) + (1.0 - sigma) * sigma_next * kept
        std_dev = s = sigma_next * drawn
    if s < MIN_NOISE_SCALE:
        return StepCoefficients(a, b, s, math.nan, math.nan, math.nan)
    if log_prob_convention(sde_type) == "normalized":
        w, c = 1.0 / (2.0 * s * s), -math.log(s) - 0.5 * math.log(2.0 * math.pi)
    else:
        w, c = 1.0, 0.0
    kl_std = s if kl_variance == "transition" else std_dev
    return StepCoefficients(a, b, s, w, c, b * b / (2.0 * kl_std * kl_std))


def coefficient_table(schedule: Schedule, sde_type: str, noise_level: float, kl_variance: str = "transition") -> Tensor:
    """All steps of a schedule as float64 [N, 6] on the host, columns a, b, s, w, c, k. Build it once, then index it."""
    sigmas = schedule.sigmas.double().tolist()
    return torch.tensor(
        [
            step_coefficients(sigma, sigma_next, sigmas[1], noise_level, sde_type, kl_variance)
            for sigma, sigma_next in pairwise(sigmas)
        ],
        dtype=torch.float64,
    )


def log_prob_convention(sde_type: str) -> str:
    """`normalized`: the Gaussian's log-density; `flow_grpo_cps`: minus the squared error, all constants dropped.

    Clip ranges are not portable between the two, and log-probs of the two never meet in one ratio. Both are means over
    the latent's elements. Raises ValueError for `ode`, which has no log-prob, and for an unknown type.
    """
    if sde_type in ("sde", "dance_sde"):
        return "normalized"
    if sde_type == "cps":
        return "flow_grpo_cps"
    if sde_type == "ode":
        raise ValueError("sde_type 'ode' has no noise and no log-prob: train on steps of sde, cps or dance_sde")
    raise ValueError(f"unknown sde_type {sde_type!r}: choose one of {', '.join(SDE_TYPES)}")


def require_log_prob(table: Tensor, steps: Sequence[int]) -> None:
    """Raises ValueError unless all of `steps` have a log-prob in `table` [N, 6]. Call it before any work is done."""
    outside = [step for step in steps if not 0 <= step < len(table)]
    if outside:
        raise ValueError(f"steps {outside} are outside the schedule, which has steps 0 to {len(table) - 1}")
    refused = [step for step in steps if not bool(torch.isfinite(table[step]).all())]
    if refused:
        scales = [float(table[step, 2]) for step in refused]
        raise ValueError(
            f"steps {refused} have no log-prob: their noise scale is {scales}, below {MIN_NOISE_SCALE}; leave "
            "them out of --sde-window-range (the last cps step never has one) or raise --noise-level"
        )


def _distance_from_one(sigma: float, sigma_max: float) -> float:
    """S of the `sde` variance: 1 - sigma, or 1 - sigma_max where sigma is 1."""
    distance = 1.0 - sigma
    if distance <= SIGMA_ONE_TOLERANCE:
        # max: in a schedule so dense that later sigmas fall within the tolerance too, those keep their own.
        distance = max(distance, 1.0 - sigma_max)
    if distance <= 0.0:
        raise ValueError(f"sigma={sigma} is 1 and so is sigma_max={sigma_max}: pass sigmas[1] of the schedule")
    return distance


def _check_request(sigma: float, sigma_next: float, noise_level: float, sde_type: str, kl_variance: str) -> None:
    if sde_type not in SDE_TYPES:
        raise ValueError(f"unknown sde_type {sde_type!r}: choose one of {', '.join(SDE_TYPES)}")
    if kl_variance not in KL_VARIANCES:
        raise ValueError(f"unknown kl_variance {kl_variance!r}: choose one of {', '.join(KL_VARIANCES)}")
    if not 0.0 <= sigma_next < sigma <= 1.0:
        raise ValueError(f"a step goes down: 0 <= sigma_next < sigma <= 1, got sigma={sigma}, sigma_next={sigma_next}")
    if sde_type != "ode" and not (math.isfinite(noise_level) and noise_level >= 0.0):
        raise ValueError(f"noise_level={noise_level} must be finite and at least 0")
    if sde_type == "cps" and noise_level > 1.0:
        raise ValueError(f"noise_level={noise_level} is above 1, where cps would subtract the predicted noise")
