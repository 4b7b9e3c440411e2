# SPDX-License-Identifier: Apache-2.0
"""Invariant: two folders have one fingerprint exactly if they hold one model, wherever they lie.

Does not cover: files that differ only between the samples; weights that were trained differ in all of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from omni_engine.checkpoint.fingerprint import model_fingerprint
from tests.tiny import make_transformer, save_folder

pytestmark = pytest.mark.fast


def test_a_moved_folder_and_its_readme_make_no_difference(tmp_path: Path) -> None:
    first = save_folder(make_transformer(), tmp_path / "first")
    second = Path(shutil.copytree(first, tmp_path / "elsewhere" / "second"))
    (second / "README.md").write_text("a note")
    assert model_fingerprint(first) == model_fingerprint(second)


def test_other_weights_of_the_same_shapes_are_another_model(tmp_path: Path) -> None:
    model = make_transformer()
    first = model_fingerprint(save_folder(model, tmp_path / "first"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-6)
    assert model_fingerprint(save_folder(model, tmp_path / "second")) != first


@pytest.mark.parametrize("file", ["scheduler/scheduler_config.json", "vae/config.json"])
def test_another_configuration_is_another_model(file: str, tmp_path: Path) -> None:
    folder = save_folder(make_transformer(), tmp_path / "model")
    before = model_fingerprint(folder)
    (folder / file).write_text((folder / file).read_text() + " ")
    assert model_fingerprint(folder) != before
