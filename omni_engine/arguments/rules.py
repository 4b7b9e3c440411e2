# SPDX-License-Identifier: Apache-2.0
"""What validation is written with: a collector of faults, and numbers for remedies."""

from __future__ import annotations

from collections.abc import Collection

from omni_engine.arguments.faults import Fault
from omni_engine.arguments.flag import plain_text
from omni_engine.arguments.settings import FLAGS, Settings


class Rules:
    """Collects faults, each with the flags concerned and their values."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.faults: list[Fault] = []

    def refuse(self, names: Collection[str], what: str, remedy: str) -> None:
        values = self.settings.values()
        where = " ".join(f"{FLAGS[name].option} {plain_text(values[name])}" for name in names)
        self.faults.append(Fault(where, what, remedy, tuple(names)))


def divisors(number: int) -> list[int]:
    """All divisors, rising."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def multiples_near(number: int, unit: int) -> str:
    """The multiples of `unit` around `number`, for people: `16 or 24`."""
    lower = number // unit * unit
    return f"{lower} or {lower + unit}" if lower else str(unit)


def listed(numbers: list[int]) -> str:
    """A list for people, cut in the middle when long: `1, 2, 3, ..., 96`."""
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:11], "...", shown[-1]])
