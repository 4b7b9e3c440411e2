# SPDX-License-Identifier: Apache-2.0
"""Prompt files, and which prompts an iteration uses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

MAX_CHARACTERS = 8192
"""Of one prompt: far beyond what a text encoder takes, but less than a whole file that lost its line ends."""
MAX_FAULTS = 10
"""Listed in one message."""


def load_prompts(path: str | Path, check: Callable[[str], None] | None = None) -> list[str]:
    """The prompts of a UTF-8 file: `.txt`, one a line, or `.jsonl`, one object a line with the key "prompt".

    Blank lines are skipped; the prompts keep their order, their blanks and their repetitions. `check` raises ValueError
    for a prompt that the run cannot use.

    Raises FileNotFoundError, or ValueError naming the file and the lines at fault.
    """
    path = Path(path)
    parsers = {".txt": _plain, ".jsonl": _json_prompt}
    if path.suffix not in parsers:
        raise ValueError(f"{path}: a prompt file ends in .txt (one a line) or .jsonl (objects with the key 'prompt')")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such prompt file; check the path (it is relative to the working folder)")
    prompts, faults = [], []
    # Not str.splitlines(): it also splits at the Unicode separators that a prompt may hold.
    for number, line in enumerate(_read_utf8(path).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        try:
            prompt = parsers[path.suffix](line)
            if len(prompt) > MAX_CHARACTERS:
                raise ValueError(
                    f"{len(prompt)} characters are over the limit of {MAX_CHARACTERS} a prompt; shorten it"
                )
            if check is not None:
                check(prompt)
            prompts.append(prompt)
        except ValueError as error:
            faults.append(f"{path}:{number}: {error}")
    if faults:
        more = [f"... and {len(faults) - MAX_FAULTS} more lines at fault"] if len(faults) > MAX_FAULTS else []
        raise ValueError("\n".join(faults[:MAX_FAULTS] + more))
    if not prompts:
        raise ValueError(f"{path}: no prompt in this file; give a file with at least one")
    return prompts


def _read_utf8(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}:{line}: not UTF-8 (byte 0x{content[error.start]:02x} at offset {error.start}: {error.reason}); "
            "convert the file, for example with iconv -t UTF-8"
        ) from error


def _plain(line: str) -> str:
    return line


def _json_prompt(line: str) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"].strip():
        raise ValueError('expected an object with a text that is not blank under the key "prompt"')
    prompt: str = entry["prompt"]
    return prompt


class PromptSampler:
    """Which prompts an iteration uses: a function of (seed, iteration) alone, so a resumed run goes on exactly.

    Every epoch is a new permutation of all prompts, and the epochs follow each other without a gap, so each prompt is
    used once an epoch. A step that lies across two epochs has no prompt twice either.
    """

    def __init__(self, num_prompts: int, per_step: int, seed: int) -> None:
        """Raises ValueError if a step wants more prompts than there are, or the seed is not in [0, 2**64)."""
        if not 1 <= per_step <= num_prompts:
            raise ValueError(
                f"a step of {per_step} prompts cannot be drawn without repetition from {num_prompts} prompts: "
                f"give more prompts, or --prompts-per-step between 1 and {num_prompts}"
            )
        if not 0 <= seed < 2**64:
            raise ValueError(f"the seed {seed} is not in [0, 2**64): give --seed in that range")
        self._num_prompts, self._per_step, self._seed = num_prompts, per_step, seed

    def at(self, iteration: int) -> list[int]:
        """The `per_step` different indices, in [0, num_prompts), of iteration 0, 1, ...

        Raises ValueError for a negative iteration.
        """
        if iteration < 0:
            raise ValueError(f"iteration {iteration} is negative: iterations count from 0")
        epoch, start = divmod(iteration * self._per_step, self._num_prompts)
        indices = self._order(epoch)[start : start + self._per_step]
        missing = self._per_step - len(indices)
        return indices + self._order(epoch + 1)[:missing] if missing else indices

    def _order(self, epoch: int) -> list[int]:
        """The epoch's permutation, but what the step across its start has used already comes after that step."""
        order = self._permutation(epoch)
        lead = -epoch * self._num_prompts % self._per_step  # prompts that this epoch adds to a step of the last one
        if lead == 0:
            return order
        # The change reaches per_step places at most, so with two steps an epoch it never reaches the epoch's end.
        short = self._num_prompts < 2 * self._per_step
        previous = self._order(epoch - 1) if short else self._permutation(epoch - 1)
        used = set(previous[lead - self._per_step :])
        fresh = [index for index in order if index not in used][:lead]
        first = set(fresh)
        return fresh + [index for index in order if index not in first]

    def _permutation(self, epoch: int) -> list[int]:
        # Sorted raw bits: numpy keeps the bits of a generator for ever, but not the outcome of Generator.permutation.
        bits = np.random.Philox(key=np.array([self._seed, epoch], dtype=np.uint64)).random_raw(self._num_prompts)
        order: list[int] = np.argsort(bits, kind="stable").tolist()
        return order
