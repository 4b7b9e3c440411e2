# SPDX-License-Identifier: Apache-2.0
"""Invariant: reward = 1 - min(Levenshtein(read, target), len(target)) / len(target), 1 if the target stands in the text
read, both lower-cased and without white space; the target is what stands between the prompt's first two double quotes.
The distance is compared with a plain dynamic programme.

Not covered: what other programmes count as a letter (a combining accent is a character of its own here).
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from omni_engine.data import load_prompts
from omni_engine.reward import prompt_check
from omni_engine.reward.text import ocr_reward, target_text

pytestmark = pytest.mark.fast

DATA = Path(os.environ.get("OMNI_DATA_DIR") or Path(__file__).parents[3] / "shared" / "data")


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('A sign that reads "OPEN", at night', "OPEN"),
        ('"first" before "second"', "first"),
        ('a "b c" and a lone "', "b c"),
        ('quotes “like these” do not count, "these" do', "these"),
    ],
)
def test_the_target_stands_between_the_first_double_quotes(prompt: str, target: str) -> None:
    assert target_text(prompt) == target


@pytest.mark.parametrize("prompt", ["no quotes", 'one " only', "", "“curly” ones", "x" * 500])
def test_a_prompt_without_quotes_is_refused_with_an_example(prompt: str) -> None:
    with pytest.raises(ValueError, match=r'\(a sign that reads "OPEN"\); this prompt has none: ') as error:
        target_text(prompt)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize("prompt", ['an ""', 'a " \t"'])
def test_a_blank_target_is_refused(prompt: str) -> None:
    with pytest.raises(ValueError, match="no text stands between"):
        target_text(prompt)
    with pytest.raises(ValueError, match="blank"):
        ocr_reward("read", " ")


@pytest.mark.parametrize(
    ("read", "target", "reward"),
    [
        ("123", "123", 1.0),
        ("", "123", 0.0),
        ("124", "123", 1 - 1 / 3),
        ("12", "123", 1 - 1 / 3),
        ("OPEN daily", "open", 1.0),
        ("spring\tcollec tion", "Spring Collection", 1.0),
        ("something far longer", "ab", 0.0),
        ("Straße", "strasse", 1 - 2 / 7),
    ],
)
def test_known_rewards(read: str, target: str, reward: float) -> None:
    assert ocr_reward(read, target) == pytest.approx(reward, abs=1e-15)


def plain_distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        following = [i + 1]
        for j, y in enumerate(b):
            following.append(min(row[j + 1] + 1, following[j] + 1, row[j] + (x != y)))
        row = following
    return row[-1]


def test_random_texts_agree_with_the_plain_programme() -> None:
    draw = random.Random(0)
    for _ in range(500):
        read, target = ("".join(draw.choices("aB1 é", k=draw.randint(low, 8))) for low in (0, 1))
        a, b = ("".join(text.split()).lower() for text in (read, target))
        if b:
            expected = 1.0 if b in a else 1 - min(plain_distance(a, b), len(b)) / len(b)
            assert ocr_reward(read, target) == pytest.approx(expected, abs=1e-15)


def test_the_public_ocr_prompts_all_have_a_target() -> None:
    path = DATA / "ocr_prompts.txt"
    if not path.is_file():
        pytest.skip(f"{path} is not here: set OMNI_DATA_DIR to the folder that holds ocr_prompts.txt")
    prompts = load_prompts(path, prompt_check(["ocr"]))
    assert len(prompts) > 1000
    assert target_text(prompts[0]) == "Spring Collection 2024"


def test_a_prompt_file_is_refused_with_the_line_that_has_no_target(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('a "b"\n\nno target here\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"prompts\.txt:3: the OCR reward needs the text"):
        load_prompts(path, prompt_check(["ocr", "ocr_v4"]))
