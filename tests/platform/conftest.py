# SPDX-License-Identifier: Apache-2.0
"""A fresh interpreter for what can be seen only there: in which order things are imported, and what that does."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.single_process import single_process

__all__ = ["RunPython", "run_python", "single_process"]

REPOSITORY = Path(__file__).parents[2]
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """`run_python(code, first_on_path=..., OMNI_PLATFORM=...)` runs `code` as a script, by default on the CPU."""

    def run(code: str, first_on_path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(code))
        path = os.pathsep.join(str(folder) for folder in (first_on_path, REPOSITORY) if folder is not None)
        variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMNI_PLATFORM": "cpu", **environment}
        return subprocess.run(
            [sys.executable, "-W", "ignore", str(script)],
            env=variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
