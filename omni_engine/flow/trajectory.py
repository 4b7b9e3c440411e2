# SPDX-License-Identifier: Apache-2.0
"""What a rollout hands to the trainer: samples with named segments of decisions.

Shapes: B samples, K trained steps, I image tokens, C packed channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from omni_engine.flow.coefficients import coefficient_table, log_prob_convention, require_log_prob
from omni_engine.flow.schedule import Schedule


@dataclass(frozen=True, eq=False)
class FlowSegment:
    """The denoising steps of a flow model that are trained on; a decision is one step of one sample.

    modality, expert: which latent and which network (`image`, `transformer`).
    schedule, sde_type, noise_level, guidance_scale: what the rollout sampled with; the trainer replays exactly this.
    convention: of `log_prob`, see `log_prob_convention`; another one never meets it in a ratio.
    steps: K step indices into the schedule, rising.
    x_t, x_next: float32 [B, K, I, C], the latent before and after each step; x_next as stored, of which log_prob is.
    log_prob: float64 [B, K], mean over latent elements.

    Raises TypeError for another dtype (16-bit latents or log-probs move the ratio by more than a clip range),
    ValueError for shapes, steps or a convention that do not fit each other.
    """

    modality: str
    expert: str
    schedule: Schedule
    sde_type: str
    noise_level: float
    guidance_scale: float
    convention: str
    steps: tuple[int, ...]
    x_t: Tensor
    x_next: Tensor
    log_prob: Tensor

    def __post_init__(self) -> None:
        where = f"FlowSegment {self.modality!r}"
        for name, dtype in (("x_t", torch.float32), ("x_next", torch.float32), ("log_prob", torch.float64)):
            found = getattr(self, name).dtype
            if found != dtype:
                raise TypeError(f"{where}: {name} must be {dtype}, got {found}: keep trajectories in full precision")
        if self.x_t.dim() != 4 or self.x_next.shape != self.x_t.shape or self.log_prob.shape != self.x_t.shape[:2]:
            raise ValueError(
                f"{where}: expected x_t and x_next [B, K, I, C] and log_prob [B, K], got {list(self.x_t.shape)}, "
                f"{list(self.x_next.shape)} and {list(self.log_prob.shape)}"
            )
        rising = all(first < second for first, second in zip(self.steps, self.steps[1:], strict=False))
        if not self.steps or not rising or len(self.steps) != self.x_t.shape[1]:
            raise ValueError(f"{where}: steps {self.steps} must rise and be K={self.x_t.shape[1]} in number")
        expected = log_prob_convention(self.sde_type)
        if self.convention != expected:
            raise ValueError(
                f"{where}: log-probs of convention {self.convention!r} with sde_type {self.sde_type!r}, which has "
                f"{expected!r}: the rollout engine and this trainer disagree"
            )
        require_log_prob(coefficient_table(self.schedule, self.sde_type, self.noise_level), self.steps)

    def select(self, index: Tensor) -> FlowSegment:
        """The rows `index` (int64 [b]) as a segment of their own."""
        return replace(self, x_t=self.x_t[index], x_next=self.x_next[index], log_prob=self.log_prob[index])

    @staticmethod
    def cat(segments: Sequence[FlowSegment]) -> FlowSegment:
        """One segment of all rows. Raises ValueError unless they were sampled with the same schedule and settings."""
        first = segments[0]
        shared = [field.name for field in fields(FlowSegment) if field.name not in ("x_t", "x_next", "log_prob")]
        for other in segments[1:]:
            for name in shared:
                if getattr(first, name) != getattr(other, name):
                    raise ValueError(
                        f"FlowSegment {first.modality!r}: cannot join {name}={getattr(first, name)} with "
                        f"{name}={getattr(other, name)}: samples of one batch share their schedule and settings"
                    )
        return replace(
            first,
            x_t=torch.cat([segment.x_t for segment in segments]),
            x_next=torch.cat([segment.x_next for segment in segments]),
            log_prob=torch.cat([segment.log_prob for segment in segments]),
        )


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of one iteration, all made by one version of the weights.

    ids: int64 [B], global sample ids, distinct. groups: int64 [B], global prompt slot of the iteration.
    prompts: one text a group that occurs here; prompt_of: int64 [B], index into it.
    segments: decisions by name, each of B rows.

    Raises TypeError or ValueError, naming sample and step, for duplicate ids, rows that do not match, a group with two
    prompts, or a latent or log-prob that is not finite.
    """

    ids: Tensor
    groups: Tensor
    prompts: list[str]
    prompt_of: Tensor
    weight_version: int
    segments: dict[str, FlowSegment]

    def __post_init__(self) -> None:
        for name in ("ids", "groups", "prompt_of"):
            value = getattr(self, name)
            if value.dtype != torch.int64 or value.shape != (len(self.ids),):
                raise TypeError(
                    f"Samples.{name} must be int64 [B={len(self.ids)}], got {value.dtype} {list(value.shape)}"
                )
        distinct, counts = torch.unique(self.ids, return_counts=True)
        if len(distinct) != len(self.ids):
            raise ValueError(f"sample ids occur more than once: {distinct[counts > 1].tolist()}")
        self._check_prompts()
        for name, segment in self.segments.items():
            self._check_segment(name, segment)

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, index: Tensor) -> Samples:
        """The samples at positions `index` (int64 [b], no position twice), with the prompts they use."""
        kept, prompt_of = torch.unique(self.prompt_of[index], return_inverse=True)
        return replace(
            self,
            ids=self.ids[index],
            groups=self.groups[index],
            prompts=[self.prompts[position] for position in kept.tolist()],
            prompt_of=prompt_of,
            segments={name: segment.select(index) for name, segment in self.segments.items()},
        )

    @staticmethod
    def cat(parts: Sequence[Samples]) -> Samples:
        """All samples of `parts` (at least one) in order. Raises ValueError for unequal versions or settings."""
        first = parts[0]
        versions = sorted({part.weight_version for part in parts})
        if len(versions) > 1:
            raise ValueError(f"cannot join samples of weight versions {versions}: a batch is sampled by one policy")
        if any(set(part.segments) != set(first.segments) for part in parts):
            raise ValueError(f"cannot join samples with segments {[sorted(part.segments) for part in parts]}")
        prompts: list[str] = []
        slots: dict[int, int] = {}  # group -> index into prompts; a second text for a group fails the check below
        prompt_of: list[int] = []
        for part in parts:
            for group, position in zip(part.groups.tolist(), part.prompt_of.tolist(), strict=True):
                slot = slots.setdefault(group, len(prompts))
                if slot == len(prompts):
                    prompts.append(part.prompts[position])
                elif prompts[slot] != part.prompts[position]:
                    raise ValueError(f"group {group} has two prompts: {prompts[slot]!r} and {part.prompts[position]!r}")
                prompt_of.append(slot)
        return Samples(
            ids=torch.cat([part.ids for part in parts]),
            groups=torch.cat([part.groups for part in parts]),
            prompts=prompts,
            prompt_of=torch.tensor(prompt_of, dtype=torch.int64, device=first.ids.device),
            weight_version=first.weight_version,
            segments={name: FlowSegment.cat([part.segments[name] for part in parts]) for name in first.segments},
        )

    def _check_prompts(self) -> None:
        pairs = set(zip(self.groups.tolist(), self.prompt_of.tolist(), strict=True))
        groups, used = {group for group, _ in pairs}, {position for _, position in pairs}
        if used != set(range(len(self.prompts))):
            raise ValueError(f"prompt_of uses {sorted(used)} of {len(self.prompts)} prompts: keep the used ones only")
        if len(pairs) != len(groups) or len(pairs) != len(used):
            raise ValueError(f"each group has one prompt of its own, got (group, prompt) pairs {sorted(pairs)}")

    def _check_segment(self, name: str, segment: FlowSegment) -> None:
        if len(segment.log_prob) != len(self.ids):
            raise ValueError(f"segment {name!r} has {len(segment.log_prob)} rows for {len(self.ids)} samples")
        for field_name in ("x_t", "x_next", "log_prob"):
            values = getattr(segment, field_name)
            faulty = ~torch.isfinite(values.reshape(*values.shape[:2], -1)).all(dim=-1)  # [B, K]
            if faulty.any():
                row, column = faulty.nonzero()[0].tolist()
                raise ValueError(
                    f"segment {name!r}: {field_name} of sample {int(self.ids[row])} at step {segment.steps[column]} is "
                    f"not finite, and {int(faulty.sum()) - 1} more such decisions: look at the rollout's precision"
                )
