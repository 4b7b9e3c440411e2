# SPDX-License-Identifier: Apache-2.0
"""Which samples of an iteration a rank makes and trains on.

Everything follows from (seed, iteration) and the global numbers of a sample, so the same samples, with the same noise
and in the same optimizer update, come out under every layout and after every resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omni_engine.arguments import RolloutSettings
from omni_engine.flow import sde_window
from omni_engine.parallel import ParallelGroups


@dataclass(frozen=True)
class IterationPlan:
    """One rank's share of an iteration; B samples, whole groups, in the order in which the updates use them.

    Attributes:
        ids: int64 [B], global sample ids, unique over the run.
        groups: int64 [B], global prompt slot of the iteration.
        prompts: one a group of this rank.
        prompt_of: int64 [B], index into `prompts`.
        window: the denoising steps that are stochastic and trained on, the same for every sample.
    """

    iteration: int
    ids: torch.Tensor
    groups: torch.Tensor
    prompts: list[str]
    prompt_of: torch.Tensor
    window: tuple[int, ...]


def plan_iteration(
    iteration: int, prompts: Sequence[str], updates: int, settings: RolloutSettings, seed: int, groups: ParallelGroups
) -> IterationPlan:
    """This rank's share of an iteration (counted from 0).

    Update j takes the j-th equal part of the prompt slots, and each data-parallel rank an equal run of that part.

    Args:
        prompts: all prompts of the iteration, in order; their number divides by updates x data-parallel size.
    """
    per_update = len(prompts) // updates
    per_rank = per_update // groups.dp_size
    slots = [
        update * per_update + groups.dp_rank * per_rank + offset
        for update in range(updates)
        for offset in range(per_rank)
    ]
    size = settings.samples_per_prompt
    group_ids = torch.tensor(slots, dtype=torch.int64).repeat_interleave(size)
    member = torch.arange(size).repeat(len(slots))
    first_id = iteration * len(prompts) * size
    return IterationPlan(
        iteration=iteration,
        ids=first_id + group_ids * size + member,
        groups=group_ids,
        prompts=[prompts[slot] for slot in slots],
        prompt_of=torch.arange(len(slots)).repeat_interleave(size),
        window=sde_window(seed, iteration, settings.sde_window_size, settings.sde_window_range),
    )


def micro_batches(count: int, size: int) -> list[slice]:
    """Consecutive runs of `size` samples; the last one may be shorter."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
