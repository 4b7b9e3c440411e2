# SPDX-License-Identifier: Apache-2.0
"""Scorers that misbehave on demand. They live in worker processes, so what a test wants of them stands in the prompts.

A prompt is `command` or `command:argument`. Without a command the value is the picture's first byte and the text is the
prompt, so that a test sees which picture met which prompt.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from omni_engine.reward import Failure, Score


class Fake:
    """Does what the prompts say."""

    name = "fake"

    def score(self, images: list[np.ndarray], prompts: list[str]) -> list[Score | Failure]:
        if any(prompt == "too few" for prompt in prompts):
            return []
        return [self._one(image, *prompt.partition(":")[::2]) for image, prompt in zip(images, prompts, strict=True)]

    def _one(self, image: np.ndarray, command: str, argument: str) -> Score | Failure:
        if command.endswith(" once"):
            if Path(argument).exists():
                command = ""
            else:
                Path(argument).touch()
                command = command.removesuffix(" once")
        if command == "crash":
            os._exit(3)
        if command == "hang":
            time.sleep(1000)
        if command == "raise":
            raise ZeroDivisionError("asked to raise")
        if command == "fail":
            return Failure("asked to fail")
        if command == "value":
            return Score(float(argument))
        if command == "text for a number":
            return Score("0.5")  # type: ignore[arg-type]
        if command == "wait for":
            while not Path(argument).exists():
                time.sleep(0.01)
        if command == "modules":
            return Score(0.0, " ".join(sorted(sys.modules)))
        if command == "process":
            return Score(os.getpid())
        return Score(float(image[0, 0, 0]), f"{command}:{argument}" if argument else command)


class Half(Fake):
    """Another one, of half the value."""

    name = "half"

    def _one(self, image: np.ndarray, command: str, argument: str) -> Score | Failure:
        if command == "fail half":
            return Failure("asked to fail")
        return Score(float(image[0, 0, 0]) / 2)


class SameName(Fake):
    """Takes the name of another."""


class Unloadable(Fake):
    """Misses its model."""

    def __init__(self) -> None:
        raise FileNotFoundError("judge.safetensors is missing: run fetch_judge.sh")


class CannotScore(Fake):
    """Loads, but fails on the blank picture of the start-up check."""

    def score(self, images: list[np.ndarray], prompts: list[str]) -> list[Score | Failure]:
        return [Failure("no licence") for _ in images]


class DiesAtStart(Fake):
    """Ends its process while loading."""

    def __init__(self) -> None:
        os._exit(7)


class Picky(Fake):
    """Takes short prompts only."""

    @staticmethod
    def check_prompt(prompt: str) -> None:
        if len(prompt) > 10:
            raise ValueError(f"{prompt!r} is longer than 10 characters")
