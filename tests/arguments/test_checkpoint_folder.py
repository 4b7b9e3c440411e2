# SPDX-License-Identifier: Apache-2.0
"""Invariant: what a failed run says of its checkpoints is what the disk holds. Does not cover the checkpoints' content
(tests/checkpoint).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_engine.arguments import Settings, newest_iteration, settings_from_dict, where_to_continue

pytestmark = pytest.mark.fast
TRACKER = "latest_checkpointed_iteration.txt"


def settings(folder: Path, **more: Any) -> Settings:
    return settings_from_dict({"model": "m", "train_prompts": "p", "runs_dir": str(folder), "run_name": "run", **more})


def save(folder: Path, content: str) -> Path:
    folder.mkdir(parents=True)
    (folder / TRACKER).write_text(content)
    return folder


def test_the_tracker_names_the_newest_iteration(tmp_path: Path) -> None:
    assert newest_iteration(save(tmp_path / "a", "120\n")) == 120
    assert newest_iteration(tmp_path / "absent") is None
    assert newest_iteration(tmp_path / "a" / TRACKER) is None  # a file where the folder should be


@pytest.mark.parametrize("content", ["", "latest", "-1", "1.5", "9" * 19])
def test_a_tracker_without_a_number_is_refused(content: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{TRACKER} should hold the number of an iteration"):
        newest_iteration(save(tmp_path / "a", content))


def test_a_run_continues_from_its_own_checkpoint_or_from_the_one_it_was_resumed_from(tmp_path: Path) -> None:
    load = save(tmp_path / "other", "3")
    own = tmp_path / "run" / "checkpoints"
    assert where_to_continue(settings(tmp_path)) == f"There is no checkpoint in {own} yet."
    resumed = settings(tmp_path, load=str(load))
    assert where_to_continue(resumed) == f"The last whole checkpoint is iteration 3: continue with --load {load}"
    save(own, "7")
    assert where_to_continue(resumed) == f"The last whole checkpoint is iteration 7: continue with --load {own}"
    elsewhere = save(tmp_path / "elsewhere", "x")
    assert "is not known: " in where_to_continue(settings(tmp_path, save=str(elsewhere)))
