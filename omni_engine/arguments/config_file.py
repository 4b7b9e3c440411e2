# SPDX-License-Identifier: Apache-2.0
"""Reading a configuration file (YAML, or the JSON of a run's `args.json`) into a plain mapping."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from omni_engine.arguments.faults import Fault

_FORM = "Write one `flag_name: value` a line"


def read_config(path: str) -> tuple[dict[str, Any], list[Fault]]:
    """The keys and raw values of a configuration file, and what is wrong with the file itself.

    A file that cannot be read as a flat mapping gives an empty mapping and one fault.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        return {}, [Fault(f"--config {path}", f"cannot be read ({error.strerror})", "Give the path of a YAML file")]
    except UnicodeDecodeError as error:
        return {}, [Fault(f"--config {path}", f"is not UTF-8 (byte {error.start})", "Save the file as UTF-8")]
    try:
        # PyYAML and json keep the last of two equal keys without a word, so the keys are read apart.
        keys, plain = _read_json(text) if path.endswith(".json") else _read_yaml(text)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        return {}, [Fault(f"--config {path}", f"is not valid: {' '.join(str(error).split())}", _FORM)]
    if not isinstance(plain, dict):
        return {}, [Fault(f"--config {path}", "holds no mapping of flags to values", _FORM)]
    repeated = [key for key, count in Counter(key.replace("-", "_") for key in keys).items() if count > 1]
    return plain, [Fault(f"{path}, {key}", "is given more than once", "Keep one of them") for key in repeated]


def _read_yaml(text: str) -> tuple[list[str], Any]:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    keys = [str(key.value) for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    plain = yaml.safe_load(text)
    return keys, {} if plain is None else plain


def _read_json(text: str) -> tuple[list[str], Any]:
    pairs: list[tuple[str, Any]] = []

    def remember(items: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs[:] = items  # the outermost object is closed last
        return dict(items)

    plain = json.loads(text, object_pairs_hook=remember)
    return [key for key, _ in pairs] if isinstance(plain, dict) else [], plain
