# SPDX-License-Identifier: Apache-2.0
"""Invariant: an update trains on what the rollout did or on nothing. Its gradient is autograd's of the written-out loss
over the samples that count, however they are cut into micro-batches; and whatever cannot be right (another policy's or
another step's log-probs, old log-probs that follow the policy, a gradient that is not finite) is refused while every
weight is still bit for bit what it was.

Not covered: several processes (tests/distributed), the algorithm's own formulas (tests/algorithms), bf16 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omni_engine.algorithms import DecisionStats, LossOutput
from omni_engine.algorithms.flow_grpo import FlowGRPO
from omni_engine.arguments import AlgorithmSettings, OptimizerSettings, RolloutSettings
from omni_engine.flow import Samples
from omni_engine.models import DenoiserInput, TextCondition
from omni_engine.models.guidance import Guidance
from omni_engine.parallel import ParallelGroups
from omni_engine.training.optimizer import TrainingError
from tests.engine_parts import Engine, Setup, ToyComponents, build_engine, with_segment

pytestmark = pytest.mark.fast
LIMIT = RolloutSettings().max_log_prob_gap
CLIP = 0.02
GUIDANCES = [Guidance(1.0, "both"), Guidance(3.0, "both"), Guidance(3.0, "conditional")]
GUIDANCE_NAMES = ["no guidance", "both branches", "conditional branch"]
Build = Callable[..., Engine]


@pytest.fixture(scope="module")
def build(folder: Path, single_process: ParallelGroups) -> Build:
    def build(
        guidance: Guidance = GUIDANCES[0], updates: int = 2, micro_batch: int = 2, limit: float = LIMIT, kl: float = 0.0
    ) -> Engine:
        setup = Setup(
            guidance=guidance,
            algorithm=AlgorithmSettings(updates_per_rollout=updates, clip_range=CLIP, kl_coef=kl),
            optimizer=OptimizerSettings(lr=1e-2, clip_grad=0.0, weight_decay=0.0, micro_batch_size=micro_batch),
            max_log_prob_gap=limit,
        )
        return build_engine(folder, single_process, setup)

    return build


def unchanged(engine: Engine, before: dict[str, torch.Tensor]) -> bool:
    return engine.policy.version == 0 and all(torch.equal(v, before[name]) for name, v in engine.weights().items())


def off_policy(samples: Samples) -> Samples:
    """Old log-probs some way off the policy's, so that ratios lie on both sides of the clip range's edges."""
    log_prob = samples.segments["image"].log_prob
    offset = torch.rand(log_prob.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) - 0.5
    return with_segment(samples, log_prob=log_prob + 0.1 * offset)


def relative_error(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest error of a tensor, of its own norm."""
    assert set(ours) == set(theirs)
    return max(float((ours[n] - v).norm() / v.norm().clamp_min(1e-12)) for n, v in theirs.items())


# ---- the gradient


def gradient_by_hand(
    engine: Engine, samples: Samples, advantages: torch.Tensor, valid: torch.Tensor, reference: Engine | None = None
) -> dict[str, torch.Tensor]:
    """Autograd of mean over the valid decisions of max(-A r, -A clip(r)) + kl_coef KL, one sample at a time."""
    segment = samples.segments["image"]
    sigmas = segment.schedule.sigmas.double().tolist()
    total = torch.zeros((), dtype=torch.float64)

    def velocity(of: Engine, text: str, row: int, column: int) -> torch.Tensor:
        condition = TextCondition.collate(ToyComponents().encode([text]), len(text))
        time = (segment.schedule.timesteps[segment.steps[column]] / 1000).expand(1)
        latents = {"image": segment.x_t[row : row + 1, column]}
        return of.policy.stage(DenoiserInput(latents, time, condition, of.policy.shape.grid))

    def guided(of: Engine, row: int, column: int) -> torch.Tensor:
        conditional = velocity(of, samples.prompts[int(samples.prompt_of[row])], row, column)
        guidance = engine.setup.guidance
        if not guidance.active:
            return conditional
        negative = velocity(of, engine.encoder.negative_prompt, row, column)
        if guidance.gradient == "conditional":
            negative = negative.detach()
        combined = negative + guidance.scale * (conditional - negative)
        return combined * (conditional.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))

    for row in valid.nonzero().flatten().tolist():
        for column, step in enumerate(segment.steps):
            sigma, dt = sigmas[step], sigmas[step + 1] - sigmas[step]
            std = segment.noise_level * (sigma / (1 - (sigmas[1] if sigma == 1 else sigma))) ** 0.5
            scale = std * (-dt) ** 0.5
            drift = (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
            v, x, x_next = (
                guided(engine, row, column).double(),
                *(t[row : row + 1, column].double() for t in (segment.x_t, segment.x_next)),
            )
            mean = x * (1 + std**2 / (2 * sigma) * dt) + v * drift
            log_prob = torch.distributions.Normal(mean, scale).log_prob(x_next).mean()
            ratio = (log_prob - segment.log_prob[row, column]).exp()
            advantage = advantages[row]
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
            if reference is not None:
                with torch.no_grad():
                    anchor = guided(reference, row, column).double()
                settings = engine.setup.algorithm
                loss = loss + settings.kl_coef * (drift * (v - anchor)).square().mean() / (2 * scale**2)
            total = total + loss / (int(valid.sum()) * len(segment.steps))
    parameters = engine.policy.trained_parameters()
    gradients = torch.autograd.grad(total, list(parameters.values()), materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


@pytest.mark.parametrize("guidance", GUIDANCES, ids=GUIDANCE_NAMES)
def test_the_gradient_is_autograds_of_the_written_out_loss(build: Build, guidance: Guidance) -> None:
    engine = build(guidance, updates=1, limit=1.0)
    samples, scored = off_policy(engine.sample()), engine.scored(failed=(1, 6))
    advantages = engine.algorithm.advantages(scored.rewards, scored.groups, scored.valid)
    expected = gradient_by_hand(build(guidance, updates=1), samples, advantages, scored.valid)
    metrics = engine.updater.run(samples, scored)
    assert metrics["policy/clip_fraction_high"] > 0 and metrics["policy/clip_fraction_low"] > 0
    assert relative_error(engine.gradients(), expected) < 1e-5


@pytest.mark.parametrize("guidance", GUIDANCES, ids=GUIDANCE_NAMES)
def test_the_gradient_of_the_kl_term_is_autograds(build: Build, guidance: Guidance) -> None:
    """With a second policy, whose weights have moved off the reference."""
    engine, start = build(guidance, updates=1, limit=1.0, kl=1000.0), build(guidance, updates=1)
    with torch.no_grad():
        for parameter in engine.policy.parameters().values():
            parameter.mul_(1.05)
    twin = build(guidance, updates=1, kl=1000.0)
    twin.policy.stage.load_state_dict(engine.policy.stage.state_dict())
    samples, scored = off_policy(engine.sample()), engine.scored()
    advantages = engine.algorithm.advantages(scored.rewards, scored.groups, scored.valid)
    expected = gradient_by_hand(twin, samples, advantages, scored.valid, reference=start)
    assert engine.updater.run(samples, scored)["policy/kl"] > 1e-5
    # The velocities differ by a hundredth, so that their difference carries a hundred times their rounding.
    assert relative_error(engine.gradients(), expected) < 1e-4


@pytest.mark.parametrize("guidance", GUIDANCES, ids=GUIDANCE_NAMES)
def test_old_log_probs_computed_again_are_those_of_the_rollout(build: Build, guidance: Guidance) -> None:
    """Bit for bit, so all metrics are equal; where the rollout's are off, the ratio no longer is."""
    engines = [build(guidance), build(guidance)]
    engines[1].updater.rules = replace(engines[1].updater.rules, recompute_old_log_prob=True)
    samples, scored = engines[0].sample(), engines[0].scored()
    metrics = [engine.updater.run(samples, scored) for engine in engines]
    assert metrics[0] == metrics[1]
    assert all(torch.equal(value, engines[1].weights()[name]) for name, value in engines[0].weights().items())

    engine = build(guidance)
    engine.updater.rules = replace(engine.updater.rules, recompute_old_log_prob=True)
    shifted = with_segment(samples, log_prob=samples.segments["image"].log_prob + LIMIT / 2)
    found = engine.updater.run(shifted, scored)
    assert found["parity/first_ratio_max_deviation"] == 0.0
    assert found["parity/log_prob_gap_max"] == pytest.approx(LIMIT / 2, rel=1e-6)


@pytest.mark.parametrize("guidance", GUIDANCES, ids=GUIDANCE_NAMES)
def test_the_cut_into_micro_batches_changes_nothing(build: Build, guidance: Guidance) -> None:
    engine = build(guidance, limit=1.0)
    samples, scored = off_policy(engine.sample()), engine.scored(failed=(2,))
    gradients, losses = [], []
    for size in (2, 4, 1):
        engine = build(guidance, updates=1, micro_batch=size, limit=1.0)
        losses.append(engine.updater.run(samples, scored)["policy/loss"])
        gradients.append(engine.gradients())
    for gradient, loss in zip(gradients[1:], losses[1:], strict=True):
        assert relative_error(gradient, gradients[0]) < 1e-5
        assert abs(loss - losses[0]) < 1e-8


# ---- samples without a reward


def test_a_masked_sample_counts_for_nothing_whatever_its_reward_and_advantage(build: Build) -> None:
    failed = (1, 6)
    runs = []
    for reward, advantage in ((0.0, 0.0), (1e9, 3.0), (float("nan"), float("nan"))):
        engine = build(updates=1, limit=1.0)
        scored = engine.scored(failed=failed)
        scored.rewards[list(failed)] = reward
        advantages = engine.algorithm.advantages(scored.rewards, scored.groups, scored.valid)
        advantages[list(failed)] = advantage
        engine.algorithm.advantages = lambda *_, given=advantages: given  # type: ignore[method-assign]
        metrics = engine.updater.run(off_policy(engine.sample()), scored)
        runs.append((metrics["policy/loss"], engine.gradients(), engine.weights()))
    for loss, gradient, weights in runs[1:]:
        assert loss == runs[0][0]
        assert all(torch.equal(value, gradient[name]) for name, value in runs[0][1].items())
        assert all(torch.equal(value, weights[name]) for name, value in runs[0][2].items())


def test_an_update_without_a_valid_sample_is_skipped(build: Build) -> None:
    for failed in ((4, 5, 6, 7), (0, 1, 2, 3)):
        engine = build()
        metrics = engine.updater.run(engine.sample(), engine.scored(failed=failed))
        assert engine.policy.version == 1
        assert metrics["optimizer/grad_norm"] > 0.0
        # The one update that ran is the first: its log-probs are compared, and none of its ratios has moved.
        assert metrics["parity/log_prob_gap_max"] == metrics["policy/last_ratio_max_deviation"] == 0.0


def test_an_iteration_without_a_valid_sample_moves_nothing(build: Build) -> None:
    engine = build()
    before = engine.weights()
    engine.updater.run(engine.sample(), engine.scored(failed=range(8)))
    assert unchanged(engine, before)


# ---- refusals


def test_samples_of_other_weights_are_refused(build: Build) -> None:
    engine = build()
    samples, scored, before = engine.sample(), engine.scored(), engine.weights()
    with pytest.raises(TrainingError, match="sampled with weights 2, the trainer holds 0"):
        engine.updater.run(replace(samples, weight_version=2), scored)
    assert unchanged(engine, before)
    engine.updater.run(samples, scored)
    with pytest.raises(TrainingError, match="sampled with weights 0, the trainer holds 2"):
        engine.updater.run(samples, engine.scored(1))


def other_noise(samples: Samples) -> Samples:
    x_next = samples.segments["image"].x_next
    noise = torch.randn(x_next.shape, generator=torch.Generator().manual_seed(1))
    return with_segment(samples, x_next=x_next + 0.01 * noise)


def round_trip(name: str) -> Callable[[Samples], Samples]:
    return lambda samples: with_segment(samples, **{name: getattr(samples.segments["image"], name).bfloat16().float()})


def other_segment(**changes: object) -> Callable[[Samples], Samples]:
    return lambda samples: replace(samples, segments={"image": replace(samples.segments["image"], **changes)})


FAULTS = {
    "log-probs of another step": lambda s: with_segment(s, log_prob=s.segments["image"].log_prob.flip(1)),
    "log-probs of another sample": lambda s: with_segment(s, log_prob=s.segments["image"].log_prob.roll(1, 0)),
    "another x_next": other_noise,
    "another noise level": other_segment(noise_level=0.71),
    "another form of the step": other_segment(sde_type="dance_sde"),
    "a window shifted by a step": other_segment(steps=(1, 2)),
    "the neighbour's text": lambda s: replace(s, prompts=s.prompts[1:] + s.prompts[:1]),
    "x_t rounded to bf16": round_trip("x_t"),
    "x_next rounded to bf16": round_trip("x_next"),
}


@pytest.fixture(scope="module", params=GUIDANCES, ids=GUIDANCE_NAMES)
def rolled_out(request: pytest.FixtureRequest, build: Build) -> tuple[Engine, Samples, dict[str, torch.Tensor]]:
    """An engine that refuses what it is given, its samples, and its weights, which must stay."""
    engine = build(request.param)
    return engine, engine.sample(), engine.weights()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_log_probs_that_are_not_the_samples_own_are_refused(
    rolled_out: tuple[Engine, Samples, dict[str, torch.Tensor]], fault: Callable[[Samples], Samples]
) -> None:
    engine, samples, before = rolled_out
    with pytest.raises(TrainingError, match="log-probs differ from the rollout's"):
        engine.updater.run(fault(samples), engine.scored())
    assert unchanged(engine, before)


def test_a_trainer_with_other_guidance_is_refused(build: Build) -> None:
    engine = build(GUIDANCES[1])
    samples, before = engine.sample(), engine.weights()
    engine.updater.guidance = Guidance(2.5, "both")
    with pytest.raises(TrainingError, match="log-probs differ from the rollout's"):
        engine.updater.run(samples, engine.scored())
    assert unchanged(engine, before)


class Follower(FlowGRPO):
    """Takes the policy's own log-probs for the old ones."""

    def loss(self, stats: DecisionStats, global_count: float) -> LossOutput:
        return super().loss(replace(stats, old_log_prob=stats.log_prob.detach()), global_count)


def test_old_log_probs_that_follow_the_policy_are_refused_at_the_second_update(build: Build) -> None:
    engine = build()
    engine.updater.algorithm = Follower(engine.setup.algorithm)
    with pytest.raises(TrainingError, match="ratio is still exactly 1"):
        engine.updater.run(engine.sample(), engine.scored())
    assert engine.policy.version == 1


def test_equal_rewards_are_not_taken_for_log_probs_that_follow(build: Build) -> None:
    """Without an advantage there is no gradient, so the weights rest and a ratio of 1 is right."""
    engine = build()
    scored = engine.scored()
    scored.rewards.fill_(0.5)
    before = engine.weights()
    engine.updater.run(engine.sample(), scored)
    assert engine.policy.version == 2
    assert all(torch.equal(value, before[name]) for name, value in engine.weights().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_refused(build: Build, value: float) -> None:
    engine = build()
    samples, before = engine.sample(), engine.weights()
    weight = engine.policy.stage.blocks["0"].image.qkv.weight
    weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), value))
    with pytest.raises(TrainingError, match="the gradient is not finite"):
        engine.updater.run(samples, engine.scored())
    assert unchanged(engine, before)
    assert not engine.optimizer.optimizer.optimizer.state, "Adam has taken nothing in"
