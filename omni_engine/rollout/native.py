# SPDX-License-Identifier: Apache-2.0
"""The policy module samples by itself, under its own TP and PP layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from omni_engine.flow import (
    INITIAL_LATENT,
    STEP_NOISE,
    FlowSegment,
    Samples,
    coefficient_table,
    log_prob_convention,
    philox_normal,
    require_log_prob,
)
from omni_engine.models import Components
from omni_engine.models.guidance import Conditions, guided_velocity, joined_input
from omni_engine.models.policy import Policy
from omni_engine.ops import gaussian_mean, gaussian_step
from omni_engine.parallel.collectives import broadcast_from_last_stage
from omni_engine.platform import get_platform
from omni_engine.rollout.conditions import PromptEncoder
from omni_engine.rollout.engine import RolloutChunk, RolloutRequest
from omni_engine.rollout.plan import micro_batches


@dataclass
class _Walk:
    """One micro-batch on its way from noise to a picture. x [b, I, C] float32 is equal on all ranks of the replica."""

    rows: slice
    ids: torch.Tensor
    x: torch.Tensor
    conditions: Conditions
    x_t: list[torch.Tensor]
    x_next: list[torch.Tensor]
    log_prob: list[torch.Tensor]


class NativeRollout:
    """Samples with the trainer's own weights: nothing to synchronise, and log-probs equal to the trainer's."""

    def __init__(self, policy: Policy, encoder: PromptEncoder, components: Components | None, height: int, width: int):
        """`components`: the codec on the source rank of a replica, None on its other ranks."""
        self.policy = policy
        self.encoder = encoder
        self.components = components
        self.height, self.width = height, width
        self.version = policy.version

    def update_weights(self, version: int) -> None:
        """The weights are the policy's own; only the version is checked.

        Raises:
            RuntimeError: the policy does not hold that version.
        """
        if version != self.policy.version:
            raise RuntimeError(f"the rollout was told of weights {version}, the policy holds {self.policy.version}")
        self.version = version

    def generate(self, request: RolloutRequest) -> Iterator[RolloutChunk]:
        """Sample, decode and hand over chunk after chunk; a chunk fills the pipeline once.

        Raises:
            ValueError: a step of the window has no log-prob, or a latent is not finite.
        """
        tokens = self.encoder.prepare(request.prompts, request.guidance)
        for rows in self._passes(len(request.ids), request.micro_batch_size):
            walks = [self._start(request, share, tokens) for share in rows]
            self._denoise(request, walks)
            for walk in walks:
                yield self._finish(request, walk)

    def _passes(self, count: int, size: int) -> list[list[slice]]:
        """Micro-batches that run together: as many as there are stages, all of one shape."""
        passes: list[list[slice]] = []
        for rows in micro_batches(count, size):
            length = rows.stop - rows.start
            room = passes and len(passes[-1]) < self.policy.groups.pp_size
            if room and passes[-1][0].stop - passes[-1][0].start == length:
                passes[-1].append(rows)
            else:
                passes.append([rows])
        return passes

    def _start(self, request: RolloutRequest, rows: slice, tokens: int) -> _Walk:
        shape = self.policy.shape
        ids = request.ids[rows]
        noise = philox_normal(request.seed, ids, 0, INITIAL_LATENT, shape.tokens * shape.channels)
        x = noise.view(-1, shape.tokens, shape.channels).to(get_platform().device())
        prompts = [request.prompts[index] for index in request.prompt_of[rows].tolist()]
        return _Walk(rows, ids, x, self.encoder.conditions(prompts, tokens, request.guidance), [], [], [])

    def _denoise(self, request: RolloutRequest, walks: list[_Walk]) -> None:
        """All steps of the schedule for micro-batches that share the pipeline."""
        schedule = request.schedule
        stochastic = coefficient_table(schedule, request.sde_type, request.noise_level)
        deterministic = coefficient_table(schedule, "ode", 0.0)
        require_log_prob(stochastic, request.window)
        times = self.policy.family.model_time(schedule)
        for step in range(schedule.num_steps):
            inside = step in request.window
            velocities = self._velocities(request, walks, times[step], alone=inside and request.guidance.detached)
            for index, walk in enumerate(walks):
                velocity = velocities[index] if velocities else None
                if inside:
                    self._stochastic_step(request, walk, velocity, step, stochastic[step])
                else:
                    x_next = torch.empty_like(walk.x)
                    if velocity is not None:
                        x_next = gaussian_mean(walk.x, velocity, deterministic[step].expand(len(walk.x), 6))
                    walk.x = broadcast_from_last_stage(x_next, self.policy.groups)

    def _velocities(
        self, request: RolloutRequest, walks: list[_Walk], time: torch.Tensor, alone: bool
    ) -> list[torch.Tensor]:
        """Guided velocities on the last stage, nothing on earlier ones.

        `alone`: run the branches one after the other, as the trainer does when only one of them has a graph.
        """
        family, grid = self.policy.family, self.policy.shape.grid

        def run(conditions: list[Conditions]) -> list[torch.Tensor]:
            return self.policy.evaluate(
                [
                    joined_input(walk.x, time.expand(len(walk.x)).to(walk.x.device), condition, family.modality, grid)
                    for walk, condition in zip(walks, conditions, strict=True)
                ]
            )

        if not alone:
            outputs = run([walk.conditions for walk in walks])
            return [guided_velocity(family, output, request.guidance, None) for output in outputs]
        conditional = run([walk.conditions.only_conditional() for walk in walks])
        unconditional = run([walk.conditions.only_unconditional() for walk in walks])
        return [
            guided_velocity(family, output, request.guidance, other)
            for output, other in zip(conditional, unconditional, strict=True)
        ]

    def _stochastic_step(
        self, request: RolloutRequest, walk: _Walk, velocity: torch.Tensor | None, step: int, coefficients: torch.Tensor
    ) -> None:
        x_next = torch.empty_like(walk.x)
        log_prob = torch.empty(len(walk.x), dtype=torch.float64, device=walk.x.device)
        if velocity is not None:
            noise = philox_normal(request.seed, walk.ids, step, STEP_NOISE, walk.x[0].numel()).view(walk.x.shape)
            rows = coefficients.expand(len(walk.x), 6)
            x_next, log_prob = gaussian_step(walk.x, velocity, noise.to(walk.x.device), rows)
        walk.x_t.append(walk.x)
        walk.x = broadcast_from_last_stage(x_next, self.policy.groups)
        walk.x_next.append(walk.x)
        walk.log_prob.append(broadcast_from_last_stage(log_prob, self.policy.groups))

    def _finish(self, request: RolloutRequest, walk: _Walk) -> RolloutChunk:
        if not bool(torch.isfinite(walk.x).all()):
            bad = walk.ids[~torch.isfinite(walk.x).flatten(1).all(1).cpu()]
            raise ValueError(
                f"the final latents of samples {bad.tolist()} are not finite: the policy has diverged; lower --lr or "
                "resume from an earlier checkpoint"
            )
        segments = {}
        if request.window:
            segments[self.policy.family.modality] = FlowSegment(
                modality=self.policy.family.modality,
                expert="transformer",
                schedule=request.schedule,
                sde_type=request.sde_type,
                noise_level=request.noise_level,
                guidance_scale=request.guidance.scale,
                convention=log_prob_convention(request.sde_type),
                steps=request.window,
                x_t=torch.stack(walk.x_t, dim=1),
                x_next=torch.stack(walk.x_next, dim=1),
                log_prob=torch.stack(walk.log_prob, dim=1),
            )
        used, prompt_of = request.prompt_of[walk.rows].unique(return_inverse=True)
        samples = Samples(
            ids=walk.ids,
            groups=request.groups[walk.rows],
            prompts=[request.prompts[index] for index in used.tolist()],
            prompt_of=prompt_of,
            weight_version=self.version,
            segments=segments,
        )
        images = None
        if self.components is not None:
            images = self.components.decode(walk.x, self.height, self.width).numpy()
        return RolloutChunk(samples, images)
