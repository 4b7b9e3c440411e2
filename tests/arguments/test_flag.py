# SPDX-License-Identifier: Apache-2.0
"""A value means the same, or is refused alike, whether it comes as text of a command line or as a YAML scalar.

Does not cover the rules between flags (test_validate.py).
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import Any

import pytest

from omni_engine.arguments.flag import Flag, flag, flags_of, plain_text

pytestmark = pytest.mark.fast


@dataclass(frozen=True)
class Example:
    needed: str = flag(help="")
    whole: int = flag(3, help="", at_least=1)
    number: float = flag(0.5, help="", above=0, below=1)
    text: str = flag("a", help="", choices=("a", "b"))
    switch: bool = flag(False, help="")
    maybe: int | None = flag(None, help="")
    pair: tuple[int, int] = flag((0, 5), help="", at_least=0)
    names: tuple[str, ...] = flag(("x",), help="", nargs="+")


FLAGS: dict[str, Flag] = {one.name: one for one in flags_of(Example, "example")}


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("whole", "16", 16),
        ("whole", 16, 16),
        ("number", "1e-4", 1e-4),  # also how YAML hands over 1e-4: as text
        ("number", 0.25, 0.25),
        ("number", 1, 1.0),
        ("text", "none", "none"),
        ("switch", True, True),
        ("maybe", None, None),
        ("maybe", "7", 7),
        ("pair", ["1", "4"], (1, 4)),
        ("pair", [1, 4], (1, 4)),
        ("names", ["a", "b"], ("a", "b")),
        ("names", "a", ("a",)),
    ],
)
def test_value_is_converted_to_the_type_of_its_field(name: str, raw: Any, value: Any) -> None:
    converted = FLAGS[name].convert(raw)
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("whole", "1.5", "whole number"),
        ("whole", 16.0, "whole number"),
        ("whole", True, "number"),
        ("whole", None, "null"),
        ("whole", [1], "int"),
        ("whole", {"a": 1}, "int"),
        ("number", "nan", "finite"),
        ("number", float("inf"), "finite"),
        ("text", 5, "quotes"),
        ("text", False, "quotes"),
        ("switch", "true", "true or false"),
        ("switch", 1, "true or false"),
        ("pair", [1], "exactly 2"),
        ("pair", [1, 2, 3], "exactly 2"),
        ("names", [], "at least one"),
        ("names", [["a"]], "str"),
    ],
)
def test_value_of_another_type_is_refused(name: str, raw: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FLAGS[name].convert(raw)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("whole", 1, 0),
        ("number", 0.999, 1.0),
        ("number", 1e-9, 0.0),
        ("text", "b", "c"),
        ("pair", (0, 0), (0, -1)),
        ("maybe", None, None),
    ],
)
def test_choices_and_bounds_hold_at_their_edges(name: str, good: Any, bad: Any) -> None:
    assert FLAGS[name].check(good) is None
    if bad is not None:
        assert FLAGS[name].check(bad) is not None


def test_flag_is_read_back_as_declared() -> None:
    assert FLAGS["needed"].required
    assert not FLAGS["maybe"].required
    assert FLAGS["pair"].type_name == "int int"
    assert FLAGS["names"].type_name == "str ..."
    assert FLAGS["number"].bounds == "> 0 and < 1"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-4, "0.0001"),
        (0.123456789, "0.123456789"),
        (1.0, "1"),
        (" ", '" "'),
        ((0, 5), "0 5"),
        (False, "off"),
        ((), "none"),
    ],
)
def test_value_is_shown_as_it_is_typed_and_without_loss(value: Any, text: str) -> None:
    assert plain_text(value) == text


def test_field_of_an_unsupported_type_is_refused() -> None:
    wrong = make_dataclass("wrong", [("table", dict[str, int], flag(None, help=""))])
    with pytest.raises(TypeError, match="table"):
        flags_of(wrong, "wrong")
