# SPDX-License-Identifier: Apache-2.0
"""A pipeline folder and prompt files that are sound as far as settings can tell: JSON and text only, no weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_engine.arguments import Settings, parse_settings


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """24 heads, 6 blocks, pixels in multiples of 8 (two VAE down-samplings)."""
    folder = tmp_path / "pipeline"
    for part, content in {
        "transformer": {"num_attention_heads": 24, "num_layers": 6},
        "vae": {"temperal_downsample": [False, True]},
    }.items():
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(content))
    (folder / "model_index.json").write_text("{}")
    return folder


@pytest.fixture
def required(model_folder: Path, tmp_path: Path) -> list[str]:
    """The command line of a sound run: the required flags, and outputs under the test's own folder."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red sign\n")
    model, runs = str(model_folder), str(tmp_path / "runs")
    return ["--model", model, "--train-prompts", str(prompts), "--runs-dir", runs, "--no-tensorboard"]


@pytest.fixture
def settings(required: list[str]) -> Callable[..., Settings]:
    """Makes sound settings, changed by the flags given."""
    return lambda *flags: parse_settings([*required, *flags])
