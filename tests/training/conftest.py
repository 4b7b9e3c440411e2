# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_parts import make_folder
from tests.single_process import single_process

__all__ = ["folder", "single_process"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline folder with a random transformer of two blocks."""
    return make_folder(tmp_path_factory.mktemp("tiny"), layers=2)
