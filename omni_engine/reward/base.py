# SPDX-License-Identifier: Apache-2.0
"""What a scorer is given and what it gives back, and how a scorer is found by its name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np

SCORERS: dict[str, str] = {
    "ocr": "omni_engine.reward.ocr:Ocr",
    "ocr_v4": "omni_engine.reward.ocr:OcrV4",
}
"""Name in `--reward` -> `package.module:Class`."""


class RewardError(RuntimeError):
    """The reward path itself is broken (a scorer cannot be loaded, or breaks its contract): the run must stop."""


@dataclass(frozen=True)
class Score:
    """A finite value, and what the scorer saw (the text it read, a judge's answer), for logs."""

    value: float
    text: str = ""


@dataclass(frozen=True)
class Failure:
    """A picture that could not be scored. It is retried, then its sample is masked; it never becomes a 0.0."""

    reason: str


class Scorer(Protocol):
    """Scores pictures, each by itself. Built without arguments, in a worker process, where it is called by one thread.

    A class may also have `check_prompt(prompt: str) -> None` (static; raises ValueError), which the start of a run
    calls with every prompt, and which must not load the model.
    """

    name: str
    """The key of its values: metrics read `reward/<name>`."""

    def score(self, images: list[np.ndarray], prompts: list[str]) -> list[Score | Failure]:
        """One result a picture, in order. `images` are uint8 RGB [H, W, 3]; they need not be of one size.

        An exception fails the pictures of the call, which are then tried again one by one.
        """
        ...


@dataclass(frozen=True)
class Reward:
    """What all scorers together say of a sample."""

    value: float | None
    """The weighted sum; None where a weighted scorer failed."""
    parts: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each scorer that gave one, watchers included."""
    texts: dict[str, str] = field(default_factory=dict)
    """What each scorer saw."""
    failure: str | None = None
    """Which scorers failed, watchers included, and why."""


def scorer_class(name: str) -> Callable[[], Scorer]:
    """The class behind a registered name or a dotted path `package.module:Class`.

    Raises RewardError, with the remedy, if there is none.
    """
    path = SCORERS.get(name, name)
    module_name, separator, class_name = path.partition(":")
    if not separator:
        known = ", ".join(sorted(SCORERS))
        raise RewardError(f"unknown reward {name!r}: choose from {known}, or give your own as package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RewardError(
            f"reward {name!r}: cannot import {module_name} ({error}): install what it needs, "
            "and see that the module is on PYTHONPATH"
        ) from error
    if not hasattr(module, class_name):
        raise RewardError(f"reward {name!r}: {module.__file__} has no class {class_name}")
    return cast("Callable[[], Scorer]", getattr(module, class_name))


def prompt_check(names: Sequence[str]) -> Callable[[str], None]:
    """A function that raises ValueError for a prompt that one of these scorers cannot score. Loads no model."""
    classes = [scorer_class(name) for name in names]
    checks = [checked.check_prompt for checked in classes if hasattr(checked, "check_prompt")]

    def check_all(prompt: str) -> None:
        for check in checks:
            check(prompt)

    return check_all
