# SPDX-License-Identifier: Apache-2.0
"""Text conditions: each prompt is encoded once, on one rank of a replica, and kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from omni_engine.models import Components, TextCondition
from omni_engine.models.guidance import Conditions, Guidance
from omni_engine.parallel import ParallelGroups
from omni_engine.parallel.collectives import broadcast_rows


class PromptEncoder:
    """Text embeddings by prompt, least recently used first out.

    The padded length of a batch follows from the prompts it was asked for, by one rule for rollout and trainer: another
    padding is another sum order, and then the two log-probs would differ in their last bits.
    """

    def __init__(
        self, components: Components | None, groups: ParallelGroups, negative_prompt: str, capacity: int = 4096
    ):
        """`components`: the encoder on the source rank of a replica, None on its other ranks."""
        self.components = components
        self.groups = groups
        self.negative_prompt = negative_prompt
        self.capacity = capacity
        self.cache: OrderedDict[str, torch.Tensor] = OrderedDict()

    def prepare(self, prompts: Sequence[str], guidance: Guidance) -> int:
        """Encode what is not cached yet and return the padded length for a batch of these prompts.

        A collective of the replica: all its ranks call it with the same prompts.
        """
        wanted = list(dict.fromkeys([*prompts, *([self.negative_prompt] if guidance.active else [])]))
        new = [prompt for prompt in wanted if prompt not in self.cache]
        if new:
            rows = None if self.components is None else self.components.encode(new)
            self.cache.update(zip(new, broadcast_rows(rows, self.groups), strict=True))
        for prompt in wanted:
            self.cache.move_to_end(prompt)
        while len(self.cache) > max(self.capacity, len(wanted)):
            self.cache.popitem(last=False)
        return max(self.cache[prompt].shape[0] for prompt in wanted)

    def tokens(self, prompt: str) -> int:
        """Length of a prompt that `prepare` has seen, without padding."""
        return self.cache[prompt].shape[0]

    def conditions(self, prompts: Sequence[str], tokens: int, guidance: Guidance) -> Conditions:
        """Conditions of a micro-batch, one prompt a sample, padded to `tokens`; `prepare` has seen the prompts."""
        conditional = TextCondition.collate([self.cache[prompt] for prompt in prompts], tokens)
        if not guidance.active:
            return Conditions(conditional, None)
        negative = [self.cache[self.negative_prompt]] * len(prompts)
        return Conditions(conditional, TextCondition.collate(negative, tokens))
