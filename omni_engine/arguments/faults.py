# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a command line or a configuration, told all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One refused setting or combination.

    Attributes:
        where: the flags with their values, or the place in a file.
        what: what is wrong.
        remedy: what to do about it.
        names: field names of the flags concerned (empty where no known flag is).
    """

    where: str
    what: str
    remedy: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        end = "" if self.remedy.endswith("?") else "."
        return f"{self.where}: {self.what}. {self.remedy}{end}"


class SettingsError(ValueError):
    """Raised once with every fault found; the message lists each with where it is and its remedy."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        count = f"{len(self.faults)} settings are" if len(self.faults) > 1 else "1 setting is"
        super().__init__("\n".join([f"{count} refused:", *(f"  - {fault}" for fault in self.faults)]))
