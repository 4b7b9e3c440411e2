# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tests.single_process import single_process  # noqa: F401 - a fixture
from tests.tiny import make_transformer, save_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline folder with a random float32 transformer of two blocks. Not to be changed."""
    return save_folder(make_transformer(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one block, for tests that train. Not to be changed."""
    return save_folder(make_transformer(layers=1), tmp_path_factory.mktemp("small"))
