# SPDX-License-Identifier: Apache-2.0
"""Invariant: a prompt file gives its prompts unchanged and in order, or an error with file and line; the prompts of an
iteration depend on (seed, iteration) alone, each prompt comes once an epoch, and none comes twice in a step.

Not covered: whether a prompt fits the text encoder (that is counted in tokens, where the encoder is).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omni_engine.data import PromptSampler, load_prompts
from omni_engine.data.prompts import MAX_CHARACTERS

pytestmark = pytest.mark.fast


def written(folder: Path, content: bytes | str, name: str = "prompts.txt") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_lines_are_kept_as_they_are_but_for_their_ends(tmp_path: Path) -> None:
    text = "\ufefffirst\r\n\n  a “café”  \n \t\nfirst\nseparator\u2028inside\x0bhere\nlast"
    expected = ["first", "  a “café”  ", "first", "separator\u2028inside\x0bhere", "last"]
    assert load_prompts(written(tmp_path, text)) == expected
    assert load_prompts(str(written(tmp_path, text))) == expected


def test_json_lines(tmp_path: Path) -> None:
    prompts = ['a "quoted" one', "two\nlines", "é"]
    lines = [json.dumps({"prompt": prompt, "tag": 1}, ensure_ascii=i == 0) for i, prompt in enumerate(prompts)]
    assert load_prompts(written(tmp_path, "\n\n".join(lines), "prompts.jsonl")) == prompts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "not JSON"),
        ("[1]", "an object with a text"),
        ('{"text": "a"}', 'under the key "prompt"'),
        ('{"prompt": 3}', "an object with a text"),
        ('{"prompt": " "}', "not blank"),
    ],
)
def test_json_lines_at_fault_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path, f'{{"prompt": "good"}}\n{line}\n', "prompts.jsonl")
    with pytest.raises(ValueError, match=rf"prompts\.jsonl:2: .*{message}"):
        load_prompts(path)


def test_a_byte_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, b"good\nna\xc3\xafve\ncaf\xe9\n")
    with pytest.raises(ValueError, match=r"prompts\.txt:3: not UTF-8 \(byte 0xe9 at offset 15: .* iconv"):
        load_prompts(path)


@pytest.mark.parametrize("content", ["", "\n \n", "\ufeff\n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(ValueError, match=r"prompts\.txt: no prompt in this file"):
        load_prompts(written(tmp_path, content))


def test_a_missing_file_and_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.txt: no such prompt file"):
        load_prompts(tmp_path / "gone.txt")
    with pytest.raises(ValueError, match=r"\.txt \(one a line\) or \.jsonl"):
        load_prompts(written(tmp_path, "a", "prompts.csv"))


def test_all_lines_at_fault_are_told_at_once_but_not_thousands(tmp_path: Path) -> None:
    def check(prompt: str) -> None:
        if "bad" in prompt:
            raise ValueError("it is bad")

    content = "good\n" + "x" * (MAX_CHARACTERS + 1) + "\n" + "bad\n" * 500 + "x" * MAX_CHARACTERS
    with pytest.raises(ValueError, match="it is bad") as error:
        load_prompts(written(tmp_path, content), check)
    lines = str(error.value).splitlines()
    assert len(lines) == 11 and "prompts.txt:2: 8193 characters are over the limit of 8192 a prompt" in lines[0]
    assert lines[1].endswith("prompts.txt:3: it is bad") and lines[-1] == "... and 491 more lines at fault"


@pytest.mark.parametrize(
    ("num_prompts", "per_step"), [(1, 1), (2, 2), (7, 3), (8, 4), (5, 4), (20, 16), (17, 16), (1017, 16)]
)
def test_each_prompt_comes_once_an_epoch_and_never_twice_in_a_step(num_prompts: int, per_step: int) -> None:
    sampler = PromptSampler(num_prompts, per_step, seed=11)
    epochs = per_step + 2
    steps = [sampler.at(iteration) for iteration in range(epochs * num_prompts // per_step)]
    assert all(len(set(step)) == len(step) == per_step for step in steps)
    drawn = [index for step in steps for index in step]
    for start in range(0, len(drawn) - num_prompts + 1, num_prompts):
        assert sorted(drawn[start : start + num_prompts]) == list(range(num_prompts))


def test_an_iteration_depends_on_the_seed_and_its_number_alone() -> None:
    onward = [PromptSampler(50, 8, seed=3).at(iteration) for iteration in range(30)]
    sampler = PromptSampler(50, 8, seed=3)
    assert [sampler.at(iteration) for iteration in reversed(range(30))] == onward[::-1]
    assert onward != [PromptSampler(50, 8, seed=4).at(iteration) for iteration in range(30)]
    assert sorted(onward[0]) != sorted(onward[1])
    assert len(sampler.at(10**12)) == 8


def test_the_draw_is_pinned_so_that_a_resume_elsewhere_goes_on_with_it() -> None:
    assert [PromptSampler(10, 4, seed=1234).at(iteration) for iteration in range(3)] == [
        [8, 9, 7, 3],
        [0, 1, 4, 2],
        [5, 6, 0, 9],
    ]


def test_every_prompt_is_as_likely_at_every_place() -> None:
    counts = [[0] * 4 for _ in range(4)]
    for seed in range(2000):
        for place, index in enumerate(PromptSampler(4, 4, seed).at(0)):
            counts[place][index] += 1
    assert all(400 < count < 600 for row in counts for count in row)  # 500 expected, five deviations are 97


@pytest.mark.parametrize(("num_prompts", "per_step"), [(3, 4), (0, 1), (4, 0)])
def test_a_step_of_more_prompts_than_there_are_is_refused(num_prompts: int, per_step: int) -> None:
    with pytest.raises(ValueError, match="give more prompts, or --prompts-per-step between 1"):
        PromptSampler(num_prompts, per_step, seed=0)


def test_seeds_and_iterations_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="give --seed in that range"):
        PromptSampler(4, 2, seed=-1)
    with pytest.raises(ValueError, match="negative"):
        PromptSampler(4, 2, seed=0).at(-1)
    assert len(PromptSampler(4, 2, seed=2**64 - 1).at(0)) == 2
