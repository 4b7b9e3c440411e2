# SPDX-License-Identifier: Apache-2.0
"""Invariant: a checkpoint that is damaged, of another model or of another run is refused before it changes anything,
with a message that names it; a save that fails leaves the earlier checkpoints as they were; and reading a file runs no
code that stands in it.

Covers one process. A fault of one rank among several is in tests/distributed/test_checkpoint_reshard.py.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_engine.checkpoint import (
    CheckpointError,
    check_same_run,
    folder,
    latest_iteration,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from omni_engine.parallel import ParallelGroups
from tests.full_disk import full_disk
from tests.small_training import Trainee, build_trainee
from tests.tiny import make_transformer, save_folder

pytestmark = pytest.mark.fast
TENSORS = "__0_0.distcp"


@pytest.fixture(scope="module")
def trainee(small_folder: Path, single_process: ParallelGroups) -> Trainee:
    return build_trainee(small_folder, single_process)


@pytest.fixture(scope="module")
def saved(trainee: Trainee, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with iterations 1 and 2. Not to be changed."""
    root = tmp_path_factory.mktemp("saved")
    for iteration in (1, 2):
        save_checkpoint(root, iteration, trainee.policy, trainee.optimizer, {"seed": 3})
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A copy of it that may be changed."""
    return Path(shutil.copytree(saved, tmp_path / "root"))


def load(trainee: Trainee, root: Path, iteration: int | None = None) -> Any:
    return load_checkpoint(root, trainee.policy, trainee.optimizer, iteration)


def test_a_root_without_a_checkpoint_is_refused(root: Path, trainee: Trainee, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (root / folder.TRACKER_FILE).unlink()
    for place, message in (
        (tmp_path / "nowhere", "there is no folder .*nowhere; check the path"),
        (tmp_path / "empty", "has no latest_checkpointed_iteration.txt.*holds no checkpoint"),
        (root / "iter_0000002", f"one of several checkpoints; give the folder that holds them, {root}"),
        (root, "has no latest_checkpointed_iteration.txt.*holds iterations 1, 2; write one of them"),
    ):
        assert latest_iteration(place) is None
        for attempt in (read_state, lambda place: load(trainee, place)):
            with pytest.raises(CheckpointError, match=message):
                attempt(place)
    assert load(trainee, root, 1).iteration == 1


@pytest.mark.parametrize("text", ["", "release", "-1", "1e3"])
def test_a_tracker_without_a_number_is_refused(text: str, root: Path) -> None:
    (root / folder.TRACKER_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="should hold the number of an iteration"):
        latest_iteration(root)


def test_a_missing_iteration_is_refused_with_those_that_are_there(root: Path) -> None:
    (root / folder.TRACKER_FILE).write_text("7")
    with pytest.raises(CheckpointError, match=r"iter_0000007, which .* names, does not exist.*holds iterations 1, 2"):
        read_state(root)
    with pytest.raises(CheckpointError, match=r"iter_0000009 does not exist.*holds iterations 1, 2"):
        read_state(root, 9)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


class Evil:
    """Unpickling it would create a file."""

    def __init__(self, file: Path):
        self.file = str(file)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (self.file, "w")


def put_evil_table(place: Path) -> None:
    """A table of contents that runs code, with a checksum that fits it."""
    file = place / ".metadata"
    file.write_bytes(pickle.dumps(Evil(place / "evil_was_here")))
    change_record(place, lambda record: record["files"].update({".metadata": folder.checksum(file)}))


def change_record(place: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    record = json.loads((place / "state.json").read_text())
    change(record)
    (place / "state.json").write_text(json.dumps(record))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tensor file is gone": (lambda place: (place / TENSORS).unlink(), f"{TENSORS} does not exist"),
    "a tensor file is truncated": (
        lambda place: (place / TENSORS).write_bytes((place / TENSORS).read_bytes()[:-1]),
        f"{TENSORS} has .* bytes, .* were written",
    ),
    "a bit has flipped": (lambda place: flip_a_bit(place / TENSORS), f"{TENSORS} has changed since it was written"),
    "the table is gone": (lambda place: (place / ".metadata").unlink(), "metadata does not exist"),
    "the table is evil": (put_evil_table, "metadata is refused: it names '.*open'"),
    "the state is gone": (lambda place: (place / "state.json").unlink(), "state.json does not exist"),
    "the state is no JSON": (lambda place: (place / "state.json").write_text("{"), "state.json cannot be read"),
    "the state lacks a number": (
        lambda place: change_record(place, lambda record: record.pop("adam_step")),
        "state.json is damaged.*adam_step",
    ),
    "the format is a later one": (
        lambda place: change_record(place, lambda record: record.update(format=99)),
        "of format 99, this version reads format 1",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(damage: str, root: Path, trainee: Trainee) -> None:
    harm, message = DAMAGE[damage]
    harm(root / "iter_0000002")
    before = trainee.weights()
    with pytest.raises(CheckpointError, match=message):
        load(trainee, root)
    assert all(torch.equal(weight, before[name]) for name, weight in trainee.weights().items())
    assert not list(root.rglob("evil_was_here"))
    assert load(trainee, root, 1).iteration == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 2}, r"lacks transformer_blocks\.1\..* and \d+ more and holds nothing besides"),
        ({"heads": 2}, r"shapes differ: .* instead of "),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    changes: dict[str, int], message: str, saved: Path, tmp_path: Path, single_process: ParallelGroups
) -> None:
    other = build_trainee(save_folder(make_transformer(**{"layers": 1, **changes}), tmp_path), single_process)
    with pytest.raises(CheckpointError, match=f"another model than --model.*{message}"):
        load(other, saved)


def test_a_checkpoint_of_another_precision_is_refused(
    saved: Path, small_folder: Path, single_process: ParallelGroups
) -> None:
    with pytest.raises(CheckpointError, match=r"another precision: .* is torch.float32 instead of torch.bfloat16"):
        load(build_trainee(small_folder, single_process, bf16=True), saved)


def test_another_run_is_refused_with_all_that_differs() -> None:
    saved = {"seed": 1, "prompts": "abc", "window": [0, 5], "note": "free"}
    check_same_run(saved, {"seed": 1, "window": (0, 5)})
    with pytest.raises(CheckpointError) as caught:
        check_same_run(saved, {"seed": 2, "prompts": "abd", "window": (0, 5), "scale": 1.5})
    assert "seed was 1 and is 2" in str(caught.value)
    assert "prompts was 'abc' and is 'abd'" in str(caught.value)
    assert "scale was not saved and is 1.5" in str(caught.value)
    assert "window" not in str(caught.value)


def contents(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


@pytest.mark.parametrize("limit", [0, 10_000])
@pytest.mark.parametrize("iteration", [2, 3])
def test_a_full_disk_leaves_the_earlier_checkpoints(limit: int, iteration: int, root: Path, trainee: Trainee) -> None:
    before = contents(root)
    with (
        pytest.raises(
            CheckpointError, match=f"iteration {iteration} cannot be written to .*free space.*File too large"
        ),
        full_disk(limit),
    ):
        save_checkpoint(root, iteration, trainee.policy, trainee.optimizer, {})
    assert contents(root) == before
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["iter_0000001", "iter_0000002"]


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path, trainee: Trainee) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cannot be written to .*another --save"):
        save_checkpoint(tmp_path / "file", 1, trainee.policy, trainee.optimizer, {})


def test_state_that_json_cannot_hold_is_refused(root: Path, trainee: Trainee) -> None:
    before = contents(root)
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        save_checkpoint(root, 3, trainee.policy, trainee.optimizer, {"seed": torch.ones(1)})
    assert contents(root) == before


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_run_stopped_while_it_replaces_a_checkpoint_leaves_a_whole_one(
    renames: int, root: Path, trainee: Trainee, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped dead after any number of the renames that put iteration 2 in the place of the earlier one."""

    class Stopped(BaseException):
        """What no handler of the engine catches, as if the process had been killed."""

    rename, done = Path.rename, []

    def stopping_rename(path: Path, target: Path) -> Path:
        if path.parent != root:  # torch renames a file in the folder that it writes
            return rename(path, target)
        if len(done) == renames:
            raise Stopped
        done.append(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stopping_rename)
    monkeypatch.setattr(Path, "replace", stopping_rename)
    with pytest.raises(Stopped):
        save_checkpoint(root, 2, trainee.policy, trainee.optimizer, {"seed": 4})
    monkeypatch.undo()
    assert load(trainee, root).state == {"seed": 4 if renames == 2 else 3}
    save_checkpoint(root, 3, trainee.policy, trainee.optimizer, {"seed": 5})
    assert [load(trainee, root, iteration).iteration for iteration in (1, 2, 3)] == [1, 2, 3]
    assert not list(root.glob(".*"))


def test_what_a_stopped_save_left_is_cleared_away(root: Path, trainee: Trainee) -> None:
    (root / ".iter_0000003.partial").mkdir()
    (root / ".iter_0000003.partial" / TENSORS).write_bytes(b"half of it")
    assert latest_iteration(root) == 2
    save_checkpoint(root, 4, trainee.policy, trainee.optimizer, {})
    assert latest_iteration(root) == 4
    assert not list(root.glob(".*"))
