# SPDX-License-Identifier: Apache-2.0
"""The house rules that a machine can check: who may name a device, who may import whom, how long a file may be.

Does not cover: a device named by a string that is put together, or an import by `importlib`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

PACKAGE = Path(__file__).parents[1] / "omni_engine"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 500

# A part may import itself, parts of a lower level and "arguments", which all may read. "data" imports nothing of ours.
LEVELS = {
    "training": 5,
    **dict.fromkeys(("algorithms", "rollout", "reward", "bridge", "checkpoint"), 4),
    "models": 3,
    **dict.fromkeys(("flow", "parallel", "ops"), 2),
    "platform": 1,
    "arguments": 0,
    "data": 0,
}
DEVICE_WORDS = {"cuda", "npu", "gloo", "nccl", "hccl"}
# The parts that may name them: platform is about them, arguments only offers the choice.
MAY_NAME_DEVICES = {"platform", "arguments"}


def _part(path: Path) -> str:
    """The part a file belongs to; "" for the files at the top (the package itself and the entry points)."""
    inner = path.relative_to(PACKAGE).parts
    return inner[0] if len(inner) > 1 else ""


def _docstrings(tree: ast.AST) -> set[int]:
    """The ids of the string nodes that are docstrings or stand alone as a comment does."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def _named_devices(source: str) -> Iterator[tuple[int, str]]:
    """Lines whose code has a device word: as a whole name or attribute, or as a word of a string.

    A longer name that has one in it (Megatron's `get_cuda_rng_tracker`) names a function, not a device.
    """
    tree = ast.parse(source)
    docstrings = _docstrings(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.keyword(arg=str(text)):
                words = {text}
            case ast.alias(name=text):
                words = set(text.split("."))
            case ast.ImportFrom(module=str(text)):
                words = set(text.split("."))
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                words = set(re.findall(r"\w+", text.lower()))
            case _:
                continue
        for word in words & DEVICE_WORDS:
            yield getattr(node, "lineno", 0), word


def _imported_parts(source: str, importer: Path) -> Iterator[tuple[int, str]]:
    """The parts of omni_engine that a file imports anywhere in it, relative imports included."""
    package = ["omni_engine", *importer.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            targets = [[*module, alias.name] for alias in node.names]
        else:
            continue
        for target in targets:
            if target[0] == "omni_engine" and len(target) > 1 and target[1] in LEVELS:
                yield node.lineno, target[1]


def _may_import(importer: str, imported: str) -> bool:
    if importer in ("", imported):
        return True
    return importer != "data" and (imported == "arguments" or LEVELS[imported] < LEVELS[importer])


def test_every_folder_has_its_level() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}
    assert folders <= set(LEVELS), "give the new folder a level"


def test_only_the_platform_names_a_device_or_a_backend() -> None:
    faults = [
        f"{path.relative_to(PACKAGE)}:{line} names {word!r}: ask omni_engine.platform instead"
        for path in FILES
        if _part(path) not in MAY_NAME_DEVICES
        for line, word in _named_devices(path.read_text())
    ]
    assert not faults, "\n".join(faults)


def test_imports_run_downward_only() -> None:
    faults = [
        f"{path.relative_to(PACKAGE)}:{line} imports {imported}, which is not below {_part(path)}"
        for path in FILES
        for line, imported in _imported_parts(path.read_text(), path)
        if not _may_import(_part(path), imported)
    ]
    assert not faults, "\n".join(faults)


def test_a_file_can_be_read_in_one_sitting() -> None:
    lengths = {path.relative_to(PACKAGE): len(path.read_text().splitlines()) for path in FILES}
    assert not {path: length for path, length in lengths.items() if length > LONGEST_FILE}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x.cuda()", ["cuda"]),
        ("from torch.cuda import Stream", ["cuda"]),
        ("import torch.npu", ["npu"]),
        ("f(backend='nccl')", ["nccl"]),
        ("device = f'cuda:{rank}'", ["cuda"]),
        ("def f(gloo): ...", ["gloo"]),
        ("raise ValueError('needs HCCL')", ["hccl"]),
        ("'''A docstring on cuda.'''", []),
        ("x = 1  # cuda", []),
        ("random.get_cuda_rng_tracker()", []),
        ("input = 'an input'", []),
    ],
)
def test_the_device_check_sees_code_and_only_code(source: str, words: list[str]) -> None:
    assert [word for _, word in _named_devices(source)] == words


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import omni_engine.training.loop", ["training"]),
        ("from omni_engine import platform, flow", ["platform", "flow"]),
        ("from omni_engine.flow.schedule import Schedule", ["flow"]),
        ("def f():\n    from ..rollout import native", ["rollout"]),
        ("from ... import omni_engine", []),
        ("from .math import attention", ["models"]),
        ("import torch", []),
    ],
)
def test_the_import_check_sees_every_form(source: str, parts: list[str]) -> None:
    assert [part for _, part in _imported_parts(source, PACKAGE / "models" / "qwen_image.py")] == parts


def test_the_levels_allow_downward_and_no_other_imports() -> None:
    assert _may_import("training", "rollout") and _may_import("models", "flow") and _may_import("", "training")
    assert _may_import("rollout", "data") and _may_import("platform", "arguments")
    assert not _may_import("flow", "models") and not _may_import("rollout", "reward")
    assert not _may_import("data", "arguments") and not _may_import("arguments", "data")
