# SPDX-License-Identifier: Apache-2.0
"""A file of a run is whole or absent, and a disk that refuses is an error with path and remedy.

Does not cover network file systems that report a full disk only when a file is closed by another client.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from omni_engine.training.logging.files import LoggingError, append_bytes, make_folder, write_json

pytestmark = pytest.mark.fast


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    before = path.read_bytes()
    assert os.listdir(tmp_path) == ["summary.json"]

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LoggingError, match=r"summary\.json.*Remedy: the disk is full"):
        write_json(path, {"a": 2})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["summary.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, the device that is always full")
def test_a_full_disk_is_noticed_at_the_line_that_does_not_fit() -> None:
    with pytest.raises(LoggingError, match=r"/dev/full.*Remedy: the disk is full"):
        append_bytes(Path("/dev/full"), b"line\n")


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(LoggingError, match=r"runs.*Remedy: a file stands"):
        make_folder(tmp_path / "runs" / "name")
