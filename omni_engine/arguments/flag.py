# SPDX-License-Identifier: Apache-2.0
"""One flag: how a dataclass field declares it, and how a value given for it is read and checked.

`flag(...)` is the only definition of a flag. The argparse groups, the YAML keys, `args.json` and `docs/flags.md` are
made from it.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_METADATA_KEY = "omni_engine_flag"
_SCALARS = (bool, int, float, str)


@dataclass(frozen=True)
class _Declaration:
    help: str
    unit: str | None
    choices: tuple[str, ...] | None
    source: str | None
    nargs: str | None
    at_least: float | None
    above: float | None
    at_most: float | None
    below: float | None


def flag(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    unit: str | None = None,
    choices: Sequence[str] | None = None,
    source: str | None = None,
    nargs: str | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag and a YAML key of the same name.

    Args:
        default: the value when nobody sets the flag. Without one the flag must be given.
        help: what the flag does, one or two plain sentences.
        unit: the unit of the number ("pixels", "seconds", ...).
        choices: the strings that are allowed.
        source: the program the name and meaning come from, when they are not ours ("Megatron", "diffusers", ...).
        nargs: "+" (one or more) or "*" (any number) for a `tuple[T, ...]`; a `tuple[T, T]` takes exactly two.
        at_least, above, at_most, below: bounds of the number (or of each number), `above` and `below` exclusive.
    """
    declaration = _Declaration(
        help, unit, tuple(choices) if choices else None, source, nargs, at_least, above, at_most, below
    )
    return dataclasses.field(default=default, metadata={_METADATA_KEY: declaration})


@dataclass(frozen=True)
class Flag:
    """A flag as read back from its dataclass field."""

    name: str
    group: str
    kind: type
    optional: bool
    count: int | str | None  # None: one value; 2: exactly two; "+" or "*": a list
    default: Any
    declared: _Declaration

    @property
    def option(self) -> str:
        """The flag as typed on a command line: `--prompts-per-step`."""
        return "--" + self.name.replace("_", "-")

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def type_name(self) -> str:
        """The type for people: `int`, `int int`, `str ...`."""
        if isinstance(self.count, int):
            return " ".join([self.kind.__name__] * self.count)
        return self.kind.__name__ if self.count is None else f"{self.kind.__name__} ..."

    @property
    def bounds(self) -> str:
        """The allowed numbers for people: `>= 1`, `>= 0 and < 1`, or an empty string."""
        declared = self.declared
        pairs = ((">=", declared.at_least), (">", declared.above), ("<=", declared.at_most), ("<", declared.below))
        return " and ".join(f"{sign} {limit:g}" for sign, limit in pairs if limit is not None)

    @property
    def expected(self) -> str:
        """What to give, for people: the remedy when a value is refused."""
        if self.declared.choices:
            return f"Choose one of {', '.join(self.declared.choices)}"
        return f"Give {self.type_name} {self.bounds}".rstrip()

    def convert(self, raw: Any) -> Any:
        """The typed value of `raw`: text of a command line, or a scalar or list of YAML or JSON.

        Raises:
            ValueError: `raw` is not of the flag's type; the message says what is needed.
        """
        if raw is None:
            if self.optional:
                return None
            raise ValueError(f"needs a value of type {self.type_name}, not null")
        if self.count is None:
            return self._scalar(raw)
        items = list(raw) if isinstance(raw, (list, tuple)) else [raw]
        if isinstance(self.count, int) and len(items) != self.count:
            raise ValueError(f"needs exactly {self.count} values, got {len(items)}")
        if self.count == "+" and not items:
            raise ValueError("needs at least one value")
        return tuple(self._scalar(item) for item in items)

    def _scalar(self, raw: Any) -> Any:
        if not isinstance(raw, _SCALARS):
            raise ValueError(f"needs a value of type {self.kind.__name__}, not {raw!r}")
        if self.kind is bool:
            if isinstance(raw, bool):
                return raw
            raise ValueError(f"needs true or false, not {raw!r}")
        if self.kind is str:
            if isinstance(raw, str):
                return raw
            raise ValueError(f"needs text, but YAML reads {raw!r} here as {type(raw).__name__}: put it in quotes")
        # YAML 1.1 reads 1e-4 (no dot) as text, so numbers go through the same text form as on a command line.
        try:
            number = self.kind(str(raw).strip())
        except ValueError:
            needed = "a whole number" if self.kind is int else "a number"
            raise ValueError(f"needs {needed}, not {raw!r}") from None
        if not math.isfinite(number):
            raise ValueError(f"needs a finite number, not {raw!r}")
        return number

    def check(self, value: Any) -> str | None:
        """What is wrong with a typed value by the flag's own choices and bounds, or None."""
        if value is None:
            return None
        for item in value if self.count is not None else (value,):
            if self.declared.choices is not None and item not in self.declared.choices:
                return f"{item!r} is not one of its choices"
            if not self._within_bounds(item):
                return f"{item!r} is out of range"
        return None

    def _within_bounds(self, number: Any) -> bool:
        declared = self.declared
        return not (
            (declared.at_least is not None and number < declared.at_least)
            or (declared.above is not None and number <= declared.above)
            or (declared.at_most is not None and number > declared.at_most)
            or (declared.below is not None and number >= declared.below)
        )


def plain_text(value: Any) -> str:
    """A flag's value as it is typed on a command line; `not given` for None and `none` for an empty list."""
    if value is None:
        return "not given"
    if isinstance(value, tuple):
        return " ".join(plain_text(item) for item in value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str):
        return value if value and value == value.strip() else f'"{value}"'
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


def flags_of(concern: type, group: str) -> tuple[Flag, ...]:
    """The flags that a settings dataclass declares, in the order of its fields."""
    hints = typing.get_type_hints(concern)
    return tuple(_read_field(field, hints[field.name], group) for field in dataclasses.fields(concern))


def _read_field(field: dataclasses.Field[Any], hint: Any, group: str) -> Flag:
    declared: _Declaration = field.metadata[_METADATA_KEY]
    optional = False
    if isinstance(hint, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        optional, hint = True, kinds[0]
    count: int | str | None = None
    if typing.get_origin(hint) is tuple:
        elements = typing.get_args(hint)
        count = (declared.nargs or "*") if elements[-1] is Ellipsis else len(elements)
        hint = elements[0]
    if hint not in _SCALARS:
        raise TypeError(f"{group}.{field.name}: a flag holds bool, int, float, str or a tuple of them, not {hint!r}")
    return Flag(field.name, group, hint, optional, count, field.default, declared)
