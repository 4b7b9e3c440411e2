# SPDX-License-Identifier: Apache-2.0
"""The optimizer updates of an iteration: decisions in, a moved policy and its statistics out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from omni_engine.algorithms import Algorithm, DecisionStats
from omni_engine.flow import FlowSegment, Samples, coefficient_table
from omni_engine.models import DenoiserInput
from omni_engine.models.guidance import Conditions, Guidance, guided_velocity, joined_input
from omni_engine.models.policy import Policy
from omni_engine.ops import gaussian_kl, gaussian_log_prob
from omni_engine.parallel.collectives import any_rank, broadcast_object_from_last_stage
from omni_engine.platform import get_platform
from omni_engine.rollout import PromptEncoder, micro_batches
from omni_engine.training.logging.timers import PhaseTimers
from omni_engine.training.optimizer import PolicyOptimizer, StepResult, TrainingError
from omni_engine.training.reference import Reference
from omni_engine.training.scoring import ScoredBatch

Statistics = dict[str, torch.Tensor]
SMALLEST_MOVE = 1e-7
"""A learning rate below this may leave every float32 weight as it is."""


@dataclass(frozen=True)
class _Decisions:
    """A micro-batch at one step of the window: b decisions."""

    rows: slice
    column: int
    latents: torch.Tensor
    time: torch.Tensor
    conditions: Conditions


@dataclass(frozen=True)
class UpdateRules:
    """Numbers that shape the updates.

    Attributes:
        updates: optimizer steps an iteration.
        micro_batch_size: samples of a forward pass.
        kl_variance: which variance the KL term divides by.
        max_log_prob_gap: largest |log-prob of the trainer - of the rollout| that is accepted before the first update.
        recompute_old_log_prob: take the old log-probs from a forward pass of the trainer instead of from the rollout.
    """

    updates: int
    micro_batch_size: int
    kl_variance: str
    max_log_prob_gap: float
    recompute_old_log_prob: bool = False


class Updater:
    """Trains the policy on scored samples. All ranks call it alike."""

    def __init__(
        self,
        policy: Policy,
        optimizer: PolicyOptimizer,
        algorithm: Algorithm,
        encoder: PromptEncoder,
        guidance: Guidance,
        rules: UpdateRules,
        reference: Reference | None,
        timers: PhaseTimers,
    ):
        """`reference` is given where the algorithm needs one."""
        self.policy, self.optimizer, self.algorithm = policy, optimizer, algorithm
        self.encoder, self.guidance, self.rules = encoder, guidance, rules
        self.reference, self.timers = reference, timers

    def run(self, samples: Samples, scored: ScoredBatch) -> dict[str, float]:
        """All updates of an iteration.

        Returns: metrics, equal on every rank.

        Raises:
            TrainingError: the samples are of other weights, rollout and trainer disagree, or a gradient is not finite.
        """
        if samples.weight_version != self.policy.version:
            raise TrainingError(
                f"the rollout sampled with weights {samples.weight_version}, the trainer holds {self.policy.version}: "
                "the rollout engine was not given the newest weights"
            )
        advantages = self.algorithm.advantages(scored.rewards, scored.groups, scored.valid)
        segment = samples.segments[self.policy.family.modality]
        decisions = self._decisions(samples, segment)
        reference = self._reference_velocities(decisions)
        old_log_prob = segment.log_prob
        if self.rules.recompute_old_log_prob:
            old_log_prob = self._own_log_prob(decisions, segment)
        step = _UpdateStep(self, samples, segment, old_log_prob, advantages[scored.local], scored.valid[scored.local])
        per_update = len(decisions) // self.rules.updates
        slots_per_update = (int(scored.groups.max()) + 1) // self.rules.updates
        records: list[tuple[list[Statistics], StepResult]] = []
        for update in range(self.rules.updates):
            count = int((scored.valid & (scored.groups // slots_per_update == update)).sum()) * len(segment.steps)
            if count == 0:
                continue
            part = slice(update * per_update, (update + 1) * per_update)
            with self.timers.phase("update"):
                records.append(step.run(decisions[part], reference[part], count, is_first=not records))
        self.optimizer.end_iteration()
        return self._metrics(records, segment)

    def _decisions(self, samples: Samples, segment: FlowSegment) -> list[_Decisions]:
        """Micro-batches times window steps, in the order of the updates, with the rollout's own micro-batches."""
        tokens = self.encoder.prepare(samples.prompts, self.guidance)
        times = self.policy.family.model_time(segment.schedule)
        per_update = len(samples) // self.rules.updates
        out = []
        for rows in micro_batches(len(samples), self.rules.micro_batch_size):
            if rows.start // per_update != (rows.stop - 1) // per_update:
                raise TrainingError(f"samples {rows} of a micro-batch belong to two updates; check --micro-batch-size")
            prompts = [samples.prompts[index] for index in samples.prompt_of[rows].tolist()]
            conditions = self.encoder.conditions(prompts, tokens, self.guidance)
            for column, step in enumerate(segment.steps):
                latents = segment.x_t[rows, column]
                time = times[step].expand(len(latents)).to(latents.device)
                out.append(_Decisions(rows, column, latents, time, conditions))
        return out

    def inputs(self, decisions: Sequence[_Decisions]) -> list[DenoiserInput]:
        """The network's inputs: both branches of guidance, or the conditional one where the other gets no gradient."""
        return [
            self._input(one, one.conditions.only_conditional() if self.guidance.detached else one.conditions)
            for one in decisions
        ]

    def unconditional_velocities(self, decisions: Sequence[_Decisions]) -> list[torch.Tensor | None]:
        """The branch that gets no gradient, run without a graph with the present weights; None on earlier stages."""
        if not self.guidance.detached:
            return [None] * len(decisions)
        outputs = self.policy.evaluate([self._input(one, one.conditions.only_unconditional()) for one in decisions])
        return list(outputs) or [None] * len(decisions)

    def _input(self, decisions: _Decisions, conditions: Conditions) -> DenoiserInput:
        family = self.policy.family
        return joined_input(decisions.latents, decisions.time, conditions, family.modality, self.policy.shape.grid)

    def _reference_velocities(self, decisions: Sequence[_Decisions]) -> list[torch.Tensor | None]:
        """Guided velocities of the reference weights on the last stage; None elsewhere or without a reference."""
        if not self.algorithm.needs.reference:
            return [None] * len(decisions)
        assert self.reference is not None
        with self.timers.phase("reference"), self.reference.in_place():
            return self._velocities(decisions)

    def _own_log_prob(self, decisions: Sequence[_Decisions], segment: FlowSegment) -> torch.Tensor:
        """Log-probs float64 [B, K] by the trainer's present weights; earlier stages, which read none, keep the
        rollout's."""
        with self.timers.phase("old_log_prob"):
            old = segment.log_prob.clone()
            table = coefficient_table(segment.schedule, segment.sde_type, segment.noise_level)
            for one, velocity in zip(decisions, self._velocities(decisions), strict=True):
                if velocity is not None:
                    coefficients = table[segment.steps[one.column]].expand(len(velocity), 6)
                    x_next = segment.x_next[one.rows, one.column]
                    old[one.rows, one.column] = gaussian_log_prob(one.latents, velocity, x_next, coefficients)
            return old

    def _velocities(self, decisions: Sequence[_Decisions]) -> list[torch.Tensor | None]:
        """Guided velocities without a graph, on the last stage; None on earlier ones.

        The branches are run as in training, so that equal weights give equal bits: a KL of exactly zero, a ratio of
        exactly one.
        """
        unconditional = self.unconditional_velocities(decisions)
        outputs = self.policy.evaluate(self.inputs(decisions))
        if not outputs:
            return [None] * len(decisions)
        return [
            guided_velocity(self.policy.family, output, self.guidance, other)
            for output, other in zip(outputs, unconditional, strict=True)
        ]

    def _metrics(self, records: list[tuple[list[Statistics], StepResult]], segment: FlowSegment) -> dict[str, float]:
        """Reduce the statistics over replicas and share them; one reduction of sums and one of maxima an iteration."""
        metrics: dict[str, float] = {}
        groups = self.policy.groups
        if groups.is_last_stage and records:
            merged = [_merge(statistics) for statistics, _ in records]
            reduced = _reduce_over_data(merged, groups.dp if groups.dp_size > 1 else None)
            metrics = self._summarize(reduced, segment)
        metrics = broadcast_object_from_last_stage(metrics, groups)
        if records:
            metrics["optimizer/grad_norm"] = sum(result.grad_norm for _, result in records) / len(records)
            metrics["optimizer/learning_rate"] = records[-1][1].learning_rate
        return metrics

    def _summarize(self, reduced: list[Statistics], segment: FlowSegment) -> dict[str, float]:
        def named(statistics: Sequence[Statistics], prefix: str) -> Statistics:
            keys = [key for key in statistics[0] if key.startswith(prefix)]
            combine = torch.sum if prefix == "sum/" else torch.amax
            return {key.removeprefix(prefix): combine(torch.stack([s[key] for s in statistics]), 0) for key in keys}

        metrics = self.algorithm.metrics(named(reduced, "sum/"), named(reduced, "max/"))
        first = reduced[0]
        count = first["sum_parity/count"].clamp_min(1)
        for column, step in enumerate(segment.steps):
            metrics[f"parity/log_prob_gap/step_{step}"] = float(first["max_parity/gap"][column])
        metrics["parity/log_prob_gap_mean"] = float((first["sum_parity/gap"] / count).mean())
        metrics["parity/log_prob_gap_max"] = float(first["max_parity/gap"].max())
        metrics["parity/first_ratio_max_deviation"] = float(first["max/ratio_off_one"])
        metrics["policy/last_ratio_max_deviation"] = float(reduced[-1]["max/ratio_off_one"])
        return metrics


class _UpdateStep:
    """One optimizer update: loss of each micro-batch, checks, step."""

    def __init__(
        self,
        updater: Updater,
        samples: Samples,
        segment: FlowSegment,
        old_log_prob: torch.Tensor,
        advantages: torch.Tensor,
        valid: torch.Tensor,
    ):
        """`old_log_prob` float64 [B, K], `advantages` float64 [B] and `valid` bool [B] of this rank's samples."""
        device = get_platform().device()
        self.updater = updater
        self.samples, self.segment, self.old_log_prob = samples, segment, old_log_prob
        self.advantages, self.valid = advantages.to(device), valid.to(device)
        self.coefficients = coefficient_table(
            segment.schedule, segment.sde_type, segment.noise_level, updater.rules.kl_variance
        )
        self.moved = False

    def run(
        self,
        decisions: Sequence[_Decisions],
        reference: Sequence[torch.Tensor | None],
        count: int,
        is_first: bool,
    ) -> tuple[list[Statistics], StepResult]:
        """Forward and backward over the micro-batches, then the optimizer. `count`: global number of decisions."""
        updater = self.updater
        unconditional = updater.unconditional_velocities(decisions)
        updater.optimizer.zero_grad()

        def loss_of(index: int, output: torch.Tensor) -> tuple[torch.Tensor, Statistics]:
            return self._loss(decisions[index], output, reference[index], unconditional[index], count)

        statistics = updater.policy.train(updater.inputs(decisions), loss_of)
        self._check(statistics, is_first)
        result = updater.optimizer.step()
        self.moved = result.grad_norm > 0 and result.learning_rate > SMALLEST_MOVE
        return statistics, result

    def _loss(
        self,
        decisions: _Decisions,
        output: torch.Tensor,
        reference: torch.Tensor | None,
        unconditional: torch.Tensor | None,
        count: int,
    ) -> tuple[torch.Tensor, Statistics]:
        rows, column = decisions.rows, decisions.column
        updater, segment = self.updater, self.segment
        velocity = guided_velocity(updater.policy.family, output, updater.guidance, unconditional)
        coefficients = self.coefficients[segment.steps[column]].expand(len(velocity), 6)
        log_prob = gaussian_log_prob(decisions.latents, velocity, segment.x_next[rows, column], coefficients)
        kl = None if reference is None else gaussian_kl(velocity, reference, coefficients)
        weights = self.valid[rows].double()
        result = updater.algorithm.loss(
            DecisionStats(
                log_prob=log_prob,
                old_log_prob=self.old_log_prob[rows, column],
                advantages=self.advantages[rows],
                weights=weights,
                kl=kl,
                sample_ids=self.samples.ids[rows],
            ),
            count,
        )
        statistics = {f"sum/{name}": value for name, value in result.sums.items()}
        statistics.update({f"max/{name}": value for name, value in result.maxima.items()})
        return result.loss, statistics | self._gap(log_prob.detach(), segment.log_prob[rows, column], column)

    def _gap(self, log_prob: torch.Tensor, of_rollout: torch.Tensor, column: int) -> Statistics:
        """Distance of the trainer's log-probs from the rollout's, in this step's column of [K]."""
        gap = (log_prob - of_rollout).abs()
        place = torch.zeros(len(self.segment.steps), dtype=torch.float64, device=gap.device)
        place[column] = 1.0
        return {
            "sum_parity/gap": place * gap.sum(),
            "sum_parity/count": place * len(gap),
            "max_parity/gap": place * gap.max(),
        }

    def _check(self, statistics: Sequence[Statistics], is_first: bool) -> None:
        """Stop before the weights move if the numbers cannot be right; all ranks stop together."""
        limit = self.updater.rules.max_log_prob_gap
        gap = max((float(s["max_parity/gap"].max()) for s in statistics), default=0.0)
        # A replica whose samples are all masked sees no ratio move, so it takes all of them to tell.
        disagree, ratio_moved, diverged = any_rank(
            is_first and not gap <= limit,
            any(float(s["max/ratio_off_one"]) > 0.0 for s in statistics),
            not self.updater.optimizer.gradients_are_finite(),
        )
        if disagree:
            raise TrainingError(
                f"before the first update the trainer's log-probs differ from the rollout's by up to {gap:.3g} on this "
                f"rank (limit --max-log-prob-gap {limit:g}): rollout and trainer do not compute the same policy"
            )
        if self.moved and not ratio_moved:
            raise TrainingError(
                "the weights moved, yet every probability ratio is still exactly 1: the old log-probs follow the "
                "policy instead of staying those of the rollout"
            )
        if diverged:
            raise TrainingError(
                "the gradient is not finite: the update was refused and the weights are unchanged. Resume from an "
                "earlier checkpoint with a lower --lr"
            )


def _merge(statistics: Sequence[Statistics]) -> Statistics:
    """Add up the sums and take the largest maxima over micro-batches."""
    return {
        key: (torch.sum if key.startswith("sum") else torch.amax)(torch.stack([s[key] for s in statistics]), 0)
        for key in statistics[0]
    }


def _reduce_over_data(updates: list[Statistics], group: Any) -> list[Statistics]:
    """Reduce every update's statistics over the replicas with two collectives."""
    if group is None:
        return updates
    reduced: list[Statistics] = [{} for _ in updates]
    for prefix, operation in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
        keys = [key for key in updates[0] if key.startswith(prefix)]
        parts = [(update, key) for update in range(len(updates)) for key in keys]
        flat = torch.cat([updates[update][key].double().reshape(-1) for update, key in parts])
        dist.all_reduce(flat, op=operation, group=group)
        sizes = [updates[update][key].numel() for update, key in parts]
        for (update, key), values in zip(parts, flat.split(sizes), strict=True):
            reduced[update][key] = values.view_as(updates[update][key])
    return reduced
