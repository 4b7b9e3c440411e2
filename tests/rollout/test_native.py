# SPDX-License-Identifier: Apache-2.0
"""Invariant: the native rollout walks the schedule with the noise of (seed, sample id, step): stochastic steps exactly
in the window, Euler steps elsewhere, the same noise however samples are batched, and what it hands over is what it did.

The oracle writes the steps out from the papers' formulas, on the bare network, sample by sample. float32 tolerance
1e-5: another batch is another order of sums. Not covered: several processes and exact replay (tests/distributed), the
coefficients of each SDE type (tests/flow), real components (tests/integration).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from omni_engine.arguments import OptimizerSettings, RolloutSettings
from omni_engine.flow import INITIAL_LATENT, STEP_NOISE, Samples, philox_normal
from omni_engine.models import DenoiserInput, TextCondition
from omni_engine.models.guidance import Guidance
from omni_engine.parallel import ParallelGroups
from omni_engine.rollout import RolloutChunk, RolloutRequest
from tests.engine_parts import PIXELS, Engine, Setup, ToyComponents, build_engine

pytestmark = pytest.mark.fast
ETA = 0.7
TOLERANCE = 1e-5


class Canvas(ToyComponents):
    """Keeps the final latents that it is asked to decode."""

    def __init__(self) -> None:
        super().__init__()
        self.latents: list[torch.Tensor] = []

    def decode(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        self.latents.append(latents.clone())
        return super().decode(latents, height, width)


@pytest.fixture
def engine(folder: Path, single_process: ParallelGroups) -> Engine:
    settings = RolloutSettings(
        prompts_per_step=4, samples_per_prompt=2, num_inference_steps=4, sde_window_range=(1, 3), noise_level=ETA
    )
    engine = build_engine(folder, single_process, Setup(rollout=settings, optimizer=OptimizerSettings(lr=1e-3)))
    engine.rollout.components = Canvas()
    return engine


def generate(engine: Engine, request: RolloutRequest) -> tuple[list[RolloutChunk], torch.Tensor]:
    """The chunks and the final latents."""
    assert isinstance(engine.rollout.components, Canvas)
    engine.rollout.components.latents.clear()
    chunks = list(engine.rollout.generate(request))
    return chunks, torch.cat(engine.rollout.components.latents)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).norm() / expected.norm()) < TOLERANCE


@torch.no_grad()
def walk_by_hand(engine: Engine, request: RolloutRequest, row: int) -> list[torch.Tensor]:
    """x before each step and at the end, each [1, I, C], by the formula of Flow-GRPO (arXiv:2505.05470, eq. 9)."""
    shape, schedule, sample = engine.policy.shape, request.schedule, request.ids[row : row + 1]
    sigmas = schedule.sigmas.double().tolist()
    prompt = request.prompts[int(request.prompt_of[row])]
    x = philox_normal(request.seed, sample, 0, INITIAL_LATENT, shape.tokens * shape.channels)
    x = x.view(1, shape.tokens, shape.channels)
    xs = [x]
    for step, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
        time = (schedule.timesteps[step] / 1000).expand(1)

        def velocity(text: str, x: torch.Tensor = x, time: torch.Tensor = time) -> torch.Tensor:
            condition = TextCondition.collate(ToyComponents().encode([text]), len(text))
            return engine.policy.stage(DenoiserInput({"image": x}, time, condition, shape.grid))

        v = velocity(prompt)
        if request.guidance.active:
            negative = velocity(engine.encoder.negative_prompt)
            combined = negative + request.guidance.scale * (v - negative)
            v = combined * (v.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))
        dt = sigma_next - sigma
        if step in request.window:
            std = request.noise_level * (sigma / (1 - (sigmas[1] if sigma == 1 else sigma))) ** 0.5
            noise = philox_normal(request.seed, sample, step, STEP_NOISE, x.numel()).view(x.shape)
            mean = x * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
            x = mean + std * (-dt) ** 0.5 * noise
        else:
            x = x + dt * v
        xs.append(x)
    return xs


@pytest.mark.parametrize("window", [(1, 2), (0, 1), ()], ids=["inside", "from the first step", "evaluation"])
@pytest.mark.parametrize("guidance", [Guidance(1.0, "both"), Guidance(3.0, "both"), Guidance(3.0, "conditional")])
def test_the_walk_is_that_of_the_papers_formulas(engine: Engine, window: tuple[int, ...], guidance: Guidance) -> None:
    request = replace(engine.request(engine.plan()), window=window, guidance=guidance)
    chunks, final = generate(engine, request)
    for row in (0, 5):
        xs = walk_by_hand(engine, request, row)
        assert close(final[row : row + 1], xs[-1])
        for column, step in enumerate(window):
            segment = Samples.cat([chunk.samples for chunk in chunks]).segments["image"]
            assert close(segment.x_t[row : row + 1, column], xs[step])
            assert close(segment.x_next[row : row + 1, column], xs[step + 1])


@pytest.mark.parametrize("size", [1, 3, 8])
def test_batching_changes_neither_noise_nor_samples(engine: Engine, size: int) -> None:
    request = replace(engine.request(engine.plan()), window=(0, 1), micro_batch_size=4)
    whole, final = generate(engine, request)
    parts, final_again = generate(engine, replace(request, micro_batch_size=size))
    assert [len(chunk.samples) for chunk in parts] == {1: [1] * 8, 3: [3, 3, 2], 8: [8]}[size]
    first, second = (Samples.cat([chunk.samples for chunk in chunks]) for chunks in (whole, parts))
    assert torch.equal(first.ids, second.ids) and torch.equal(first.ids, request.ids)
    ours, theirs = first.segments["image"], second.segments["image"]
    assert torch.equal(ours.x_t[:, 0], theirs.x_t[:, 0]), "the initial latent is noise and nothing else"
    assert close(theirs.x_next, ours.x_next) and close(theirs.log_prob, ours.log_prob) and close(final_again, final)


def test_siblings_and_iterations_draw_noise_of_their_own(engine: Engine) -> None:
    first, second = engine.sample(0), engine.sample(1)
    latents = torch.cat([first.segments["image"].x_t[:, 0], second.segments["image"].x_t[:, 0]]).flatten(1)
    distances = torch.cdist(latents, latents) + 1e9 * torch.eye(len(latents))
    assert float(distances.min()) > 1.0


def test_a_segment_holds_the_steps_of_the_window_in_a_chain(engine: Engine) -> None:
    request = replace(engine.request(engine.plan()), window=(1, 2, 3))
    chunks, final = generate(engine, request)
    segment = Samples.cat([chunk.samples for chunk in chunks]).segments["image"]
    assert segment.steps == (1, 2, 3) and segment.x_t.shape[1] == 3
    assert torch.equal(segment.x_next[:, :-1], segment.x_t[:, 1:])
    assert torch.equal(segment.x_next[:, -1], final), "the last step of the window is the last of all"
    assert segment.schedule == request.schedule and segment.noise_level == ETA
    assert segment.guidance_scale == request.guidance.scale and segment.sde_type == "sde"


def test_a_chunk_tells_whose_samples_it_holds(engine: Engine) -> None:
    plan = engine.plan()
    chunks, _ = generate(engine, replace(engine.request(plan), micro_batch_size=3))
    for chunk in chunks:
        samples = chunk.samples
        assert chunk.images is not None and chunk.images.shape == (len(samples), *PIXELS, 3)
        for sample, group, prompt in zip(
            samples.ids.tolist(), samples.groups.tolist(), samples.prompt_of.tolist(), strict=True
        ):
            row = plan.ids.tolist().index(sample)
            assert group == int(plan.groups[row])
            assert samples.prompts[prompt] == plan.prompts[int(plan.prompt_of[row])]


def test_an_evaluation_carries_no_segment(engine: Engine) -> None:
    chunks, _ = generate(engine, replace(engine.request(engine.plan()), window=()))
    assert all(not chunk.samples.segments and chunk.images is not None for chunk in chunks)


def test_samples_carry_the_version_that_made_them(engine: Engine) -> None:
    engine.policy.version = 3
    with pytest.raises(RuntimeError, match="weights 2, the policy holds 3"):
        engine.rollout.update_weights(2)
    engine.rollout.update_weights(3)
    chunks, _ = generate(engine, engine.request(engine.plan()))
    assert {chunk.samples.weight_version for chunk in chunks} == {3}


def test_a_step_without_a_log_prob_is_refused(engine: Engine) -> None:
    request = replace(engine.request(engine.plan()), sde_type="cps", window=(2, 3))
    with pytest.raises(ValueError, match=r"steps \[3\] have no log-prob"):
        generate(engine, request)


@pytest.mark.parametrize("window", [(), (0, 1)])
def test_a_latent_that_is_not_finite_is_refused(engine: Engine, window: tuple[int, ...]) -> None:
    with torch.no_grad():
        engine.policy.stage.head.bias[3] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        generate(engine, replace(engine.request(engine.plan()), window=window))
