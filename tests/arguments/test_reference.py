# SPDX-License-Identifier: Apache-2.0
"""The flag reference and the recipes say what the code says.

Does not cover whether the recipes train well.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omni_engine.arguments import load_settings, validate
from omni_engine.arguments.parser import parse_settings
from omni_engine.arguments.reference import main, reference
from omni_engine.arguments.settings import FLAGS
from tests.helpers import ROOT

pytestmark = pytest.mark.fast


def test_reference_lists_every_flag_once() -> None:
    page = reference()
    assert [flag.option for flag in FLAGS.values() if page.count(f"| `{flag.option}` |") != 1] == []


def test_page_that_is_out_of_date_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "flags.md"

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["reference", *arguments, str(page)])
        return main()

    assert run("--check") == 1
    assert run() == 0
    assert run("--check") == 0
    page.write_text(page.read_text().replace("`--height`", "`--hight`"))
    assert run("--check") == 1
    assert "--hight" in capsys.readouterr().out


def test_page_in_the_repository_is_up_to_date() -> None:
    assert (ROOT / "docs" / "flags.md").read_text(encoding="utf-8") == reference()


def test_quick_start_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    load_settings(["--config", "configs/recipes/quick_start.yaml", "--no-tensorboard"], world_size=1)


def test_full_recipe_is_sound_on_eight_devices(required: list[str]) -> None:
    recipe = str(ROOT / "configs" / "recipes" / "qwen_image_ocr_full.yaml")
    assert validate(parse_settings([*required, "--config", recipe]), world_size=8) == []


def test_settings_are_read_without_torch() -> None:
    """Refusals come before torch and Megatron are loaded, so they come at once."""
    code = "import sys, omni_engine.arguments; sys.exit(bool({'torch', 'megatron', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
