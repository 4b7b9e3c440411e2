# SPDX-License-Identifier: Apache-2.0
"""Invariant: a prompt is encoded once and its embedding does not depend on its neighbours; what a batch needs is never
evicted; the padded length follows from the prompts of the whole batch, so rollout and trainer pad alike.

Not covered: the encoder itself, and how the ranks of a replica share its rows (tests/distributed).
"""

from __future__ import annotations

import pytest
import torch

from omni_engine.models.guidance import Guidance
from omni_engine.parallel import ParallelGroups
from omni_engine.rollout import PromptEncoder
from tests.engine_parts import TEXT_DIM, ToyComponents

pytestmark = pytest.mark.fast
PLAIN, GUIDED = Guidance(1.0, "both"), Guidance(3.0, "both")


def encoder(groups: ParallelGroups, capacity: int = 10) -> tuple[PromptEncoder, list[str]]:
    """An encoder and the list of what it had encoded. A prompt of n characters has n tokens."""
    components = ToyComponents()
    return PromptEncoder(components, groups, negative_prompt="?", capacity=capacity), components.encoded


def test_a_prompt_is_encoded_once(single_process: ParallelGroups) -> None:
    prompts, encoded = encoder(single_process)
    assert prompts.prepare(["ab", "abcd", "ab"], PLAIN) == 4
    assert encoded == ["ab", "abcd"]
    assert prompts.prepare(["ab"], PLAIN) == 2, "the length is that of this batch"
    assert encoded == ["ab", "abcd"]


def test_the_negative_prompt_is_encoded_and_counted_with_guidance_only(single_process: ParallelGroups) -> None:
    components = ToyComponents()
    prompts = PromptEncoder(components, single_process, negative_prompt="a long negative one")
    assert prompts.prepare(["ab"], PLAIN) == 2 and components.encoded == ["ab"]
    assert prompts.prepare(["ab"], GUIDED) == len("a long negative one")
    assert components.encoded == ["ab", "a long negative one"]


def test_the_least_recently_used_prompt_goes_first(single_process: ParallelGroups) -> None:
    prompts, encoded = encoder(single_process, capacity=3)
    prompts.prepare(["a", "b", "c"], PLAIN)
    prompts.prepare(["a"], PLAIN)
    prompts.prepare(["d"], PLAIN)  # b goes
    assert set(prompts.cache) == {"a", "c", "d"}
    prompts.prepare(["a", "c", "d"], PLAIN)
    assert encoded == ["a", "b", "c", "d"]
    prompts.prepare(["b"], PLAIN)
    assert encoded == ["a", "b", "c", "d", "b"] and set(prompts.cache) == {"c", "d", "b"}


def test_a_batch_larger_than_the_cache_is_held_whole(single_process: ParallelGroups) -> None:
    prompts, _ = encoder(single_process, capacity=2)
    prompts.prepare(["x", "y"], PLAIN)
    wanted = ["a", "bb", "ccc", "dddd"]
    tokens = prompts.prepare(wanted, GUIDED)
    conditions = prompts.conditions(wanted, tokens, GUIDED)
    assert conditions.conditional.lengths == (1, 2, 3, 4)
    prompts.prepare(["e"], PLAIN)
    assert len(prompts.cache) == 2


def test_conditions_are_padded_with_zeros_one_row_a_sample(single_process: ParallelGroups) -> None:
    prompts, _ = encoder(single_process)
    tokens = prompts.prepare(["abc", "wxyz!"], GUIDED)
    conditions = prompts.conditions(["abc", "wxyz!", "abc"], tokens, GUIDED)
    assert conditions.conditional.embeddings.shape == (3, 5, TEXT_DIM)
    assert conditions.conditional.lengths == (3, 5, 3)
    assert not conditions.conditional.embeddings[0, 3:].any()
    (alone,) = ToyComponents().encode(["abc"])
    assert torch.equal(conditions.conditional.embeddings[0, :3], alone)
    assert torch.equal(conditions.conditional.embeddings[0], conditions.conditional.embeddings[2])
    assert conditions.unconditional is not None and conditions.unconditional.lengths == (1, 1, 1)
    assert conditions.unconditional.embeddings.shape == (3, 5, TEXT_DIM)
    assert prompts.conditions(["abc"], tokens, PLAIN).unconditional is None
