# SPDX-License-Identifier: Apache-2.0
"""The text that a prompt asks for, and the reward for what was read instead.

The rule is that of FlowGRPO's public OCR reward (yifan123/flow_grpo, `flow_grpo/ocr.py`), so that curves compare.
"""

from __future__ import annotations

from rapidfuzz.distance import Levenshtein


def target_text(prompt: str) -> str:
    """What stands between the first pair of double quotes of `prompt`.

    Raises ValueError if there is no such pair, or only blanks in it.
    """
    pieces = prompt.split('"', 2)
    if len(pieces) < 3:
        raise ValueError(
            "the OCR reward needs the text that the picture should show between double quotes "
            f'(a sign that reads "OPEN"); this prompt has none: {_shortened(prompt)}'
        )
    if not normalise(pieces[1]):
        raise ValueError(f"no text stands between the first pair of double quotes of this prompt: {_shortened(prompt)}")
    return pieces[1]


def normalise(text: str) -> str:
    """Lower case, no white space: neither counts for the reward."""
    return "".join(text.split()).lower()


def ocr_reward(read: str, target: str) -> float:
    """`1 - distance / len(target)` in [0, 1], both texts normalised.

    The distance is Levenshtein's, at most `len(target)`, and 0 if the target stands anywhere in the text read.
    Raises ValueError if the target is blank.
    """
    read, target = normalise(read), normalise(target)
    if not target:
        raise ValueError("the target text of an OCR reward is blank")
    if target in read:
        return 1.0
    return 1.0 - min(Levenshtein.distance(read, target), len(target)) / len(target)


def _shortened(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 80 else prompt[:77] + "...")
