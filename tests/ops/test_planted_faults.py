# SPDX-License-Identifier: Apache-2.0
"""Invariant: replaying a stored decision gives a ratio of exactly 1, and every known way to replay it wrongly does not.

That is what the parity check of a training step stands on: |ratio - 1| must be 0 at the first update of a rollout. Each
fault must move every single sample by more than THRESHOLD. At 512 elements a sample the smallest fault here (v or x_t
rounded to bfloat16) moves a sample by about 1e-6, a right replay by 0. Not covered: faults inside the model.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from omni_engine.flow import STEP_NOISE, SchedulerConfig, coefficient_table, flow_match_schedule, philox_normal
from omni_engine.ops import gaussian_log_prob, gaussian_step

pytestmark = pytest.mark.fast

THRESHOLD = 1e-8
BATCH, TOKENS, CHANNELS, STEP = 24, 8, 64, 3
SCHEDULE = flow_match_schedule(SchedulerConfig(shift=2.0), 10, TOKENS)
TABLE = coefficient_table(SCHEDULE, "sde", 0.7)
ROWS = TABLE[STEP].expand(BATCH, 6)


def latents(seed: int, step: int = STEP) -> Tensor:
    noise = philox_normal(seed, torch.arange(BATCH), step, STEP_NOISE, TOKENS * CHANNELS)
    return noise.view(BATCH, TOKENS, CHANNELS)


WEIGHT = 0.1 * latents(100)[:1].flatten(1).view(TOKENS, CHANNELS)[:1].expand(CHANNELS, CHANNELS) + torch.eye(CHANNELS)
TEXT = latents(101)[:, :1]


def model(x: Tensor, time: float, text: Tensor, weight: Tensor = WEIGHT) -> Tensor:
    return torch.tanh(x @ weight + 0.3 * text + time / 1000)


X = latents(0)
TIME = float(SCHEDULE.timesteps[STEP])
V = model(X, TIME, TEXT)
X_NEXT, OLD = gaussian_step(X, V, latents(1), ROWS)


def deviation(log_prob: Tensor, old: Tensor = OLD) -> Tensor:
    return ((log_prob - old).exp() - 1).abs()


def test_right_replay_is_exactly_one_in_any_order() -> None:
    assert torch.equal(deviation(gaussian_log_prob(X, V, X_NEXT, ROWS)), torch.zeros(BATCH, dtype=torch.float64))
    order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(0))
    for part in order.split(5):
        replay = gaussian_log_prob(X[part], V[part], X_NEXT[part], ROWS[part])
        assert torch.equal(deviation(replay, OLD[part]), torch.zeros(len(part), dtype=torch.float64))


def fresh_sample() -> Tensor:
    return gaussian_step(X, V, latents(2), ROWS)[0]


def rounded_schedule_rows() -> Tensor:
    sigmas = SCHEDULE.sigmas.bfloat16().double()
    a, b, s, w, c, k = TABLE[STEP].tolist()
    b *= float((sigmas[STEP + 1] - sigmas[STEP]) / (SCHEDULE.sigmas[STEP + 1] - SCHEDULE.sigmas[STEP]))
    return torch.tensor([[a, b, s, w, c, k]], dtype=torch.float64).expand(BATCH, 6)


FAULTS: dict[str, tuple[float, Callable[[], Tensor]]] = {
    # least movement of any sample that the fault must cause; the replay that has it
    "coefficients of the next step": (1e-3, lambda: gaussian_log_prob(X, V, X_NEXT, TABLE[STEP + 1].expand(BATCH, 6))),
    "model time of the next step": (
        THRESHOLD,
        lambda: gaussian_log_prob(X, model(X, float(SCHEDULE.timesteps[STEP + 1]), TEXT), X_NEXT, ROWS),
    ),
    "a fresh sample": (1e-5, lambda: gaussian_log_prob(X, V, fresh_sample(), ROWS)),
    "noise level five per cent off": (
        1e-4,
        lambda: gaussian_log_prob(X, V, X_NEXT, coefficient_table(SCHEDULE, "sde", 0.735)[STEP].expand(BATCH, 6)),
    ),
    "another SDE type": (
        1e-3,
        lambda: gaussian_log_prob(X, V, X_NEXT, coefficient_table(SCHEDULE, "dance_sde", 0.7)[STEP].expand(BATCH, 6)),
    ),
    "the peers' constants dropped": (
        1e-3,
        lambda: gaussian_log_prob(X, V, X_NEXT, ROWS * torch.tensor([1.0, 1, 1, 1, 0, 1], dtype=torch.float64)),
    ),
    "text of the neighbour": (THRESHOLD, lambda: gaussian_log_prob(X, model(X, TIME, TEXT.roll(1, 0)), X_NEXT, ROWS)),
    "latents of the neighbour": (1e-2, lambda: gaussian_log_prob(X.roll(1, 0), V, X_NEXT, ROWS)),
    "x_next stored in bfloat16": (THRESHOLD, lambda: gaussian_log_prob(X, V, X_NEXT.bfloat16().float(), ROWS)),
    "x_t stored in bfloat16": (THRESHOLD, lambda: gaussian_log_prob(X.bfloat16().float(), V, X_NEXT, ROWS)),
    "velocity rounded to bfloat16": (THRESHOLD, lambda: gaussian_log_prob(X, V.bfloat16(), X_NEXT, ROWS)),
    "sigmas rounded to bfloat16": (THRESHOLD, lambda: gaussian_log_prob(X, V, X_NEXT, rounded_schedule_rows())),
    "log-probs stored in bfloat16": (THRESHOLD, lambda: OLD.bfloat16().double()),
    "stale weights": (
        THRESHOLD,
        lambda: gaussian_log_prob(X, model(X, TIME, TEXT, WEIGHT + 3e-4 * WEIGHT.sin()), X_NEXT, ROWS),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_replay_is_seen_on_every_sample(fault: str) -> None:
    least, replay = FAULTS[fault]
    moved = deviation(replay())
    print(f"{fault}: min {moved.min():.1e} mean {moved.mean():.1e}")
    assert moved.min() > least
