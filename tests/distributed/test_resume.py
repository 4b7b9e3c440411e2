# SPDX-License-Identifier: Apache-2.0
"""Invariant: a run of six iterations, and one of three that another process continues for three more, are the same run
bit for bit: every metric but times, memory and throughput; every file of the last checkpoint (weights, moments,
generators); the exported weights; the pictures. With a learning rate that decays, a KL term and evaluations.
What is another run is refused before any work.

All through scripts/pretrain_flowgrpo.sh. Does not cover: another layout (test_checkpoint_reshard.py), bf16 and the
distributed optimizer (tests/checkpoint/test_resume.py), a run that is stopped within an iteration (test_bad_runs.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.runs import MODEL, TRAIN_PROMPTS, VALIDATION_PROMPTS, finished, flags, iterations, metrics, succeeded

pytestmark = pytest.mark.timeout(2400)

SETTINGS: dict[str, Any] = {
    "lr_decay_style": "linear",
    "min_lr": 1e-4,
    "lr_decay_iters": 6,  # not --train-iters, which differs between the parts
    "kl_coef": 0.04,
    "eval_prompts": VALIDATION_PROMPTS,
    "eval_num_prompts": 2,
    "eval_num_inference_steps": 3,
    "eval_interval": 3,
    "save_interval": 3,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "DP2": (2, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
}
MEASURED = ("time/", "memory/", "throughput/")


@dataclass(frozen=True)
class Pair:
    """The folders of the unbroken run and of the one in two parts."""

    unbroken: Path
    resumed: Path


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    pairs: dict[str, Pair] = {}

    def pair(layout: str) -> Pair:
        if layout not in pairs:
            pairs[layout] = train(tmp_path_factory.mktemp("resume"), *LAYOUTS[layout])
        return pairs[layout]

    return pair


def train(folder: Path, processes: int, parallel: dict[str, Any]) -> Pair:
    def run(part: str, train_iters: int, **more: Any) -> None:
        changes = SETTINGS | parallel | more | {"train_iters": train_iters, "export_hf": folder / part / "exported"}
        succeeded(flags(folder / part, changes), processes)

    run("unbroken", 6)
    run("resumed", 3)
    assert iterations(folder / "resumed" / "run") == 3
    run("resumed", 6, load=folder / "resumed" / "run" / "checkpoints")
    return Pair(folder / "unbroken", folder / "resumed")


def repeatable(run: Path) -> list[dict[str, Any]]:
    """The metrics without what is measured anew each time."""
    return [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in metrics(run)]


def files(folder: Path) -> dict[str, bytes]:
    found = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert found
    return found


def assert_same_files(ours: Path, theirs: Path) -> None:
    found, expected = files(ours), files(theirs)
    assert set(found) == set(expected)
    assert [name for name, content in expected.items() if found[name] != content] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_iterations_and_three_more_are_six(layout: str, pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of(layout)
    expected = repeatable(pair.unbroken / "run")
    assert [line["iteration"] for line in expected] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert len({line["optimizer/learning_rate"] for line in expected if "optimizer/learning_rate" in line}) == 6
    assert all(
        line["policy/kl"] > 0 for line in expected if line.get("policy/kl") is not None and line["iteration"] > 1
    )
    assert repeatable(pair.resumed / "run") == expected
    assert_same_files(
        pair.resumed / "run" / "checkpoints" / "iter_0000006", pair.unbroken / "run" / "checkpoints" / "iter_0000006"
    )
    assert_same_files(pair.resumed / "exported" / "transformer", pair.unbroken / "exported" / "transformer")
    for picture in ("before.png", "after.png"):
        assert (pair.resumed / "run" / picture).read_bytes() == (pair.unbroken / "run" / picture).read_bytes()


def test_training_has_moved_what_is_compared(pair_of: Callable[[str], Pair]) -> None:
    """Otherwise the equality above would mean nothing."""
    checkpoints = pair_of("one process").unbroken / "run" / "checkpoints"
    early, late = files(checkpoints / "iter_0000003"), files(checkpoints / "iter_0000006")
    assert early["__0_0.distcp"] != late["__0_0.distcp"]


def test_another_run_is_refused_before_any_work(tmp_path: Path, pair_of: Callable[[str], Pair]) -> None:
    """All differences are told in one message; nothing of the run that was to be continued is touched."""
    pair = pair_of("one process")
    prompts = tmp_path / "other.txt"
    prompts.write_text("".join(TRAIN_PROMPTS.read_text().splitlines(keepends=True)[1:]))
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / "transformer" / "diffusion_pytorch_model.safetensors").unlink()  # whoever asks for it fails otherwise
    load = {"load": pair.resumed / "run" / "checkpoints", "train_iters": 7, "model": model}
    other = {"seed": 99, "train_prompts": prompts, "noise_level": 0.5, "prompts_per_step": 8}
    before = files(pair.resumed / "run")
    status, text = finished(flags(pair.resumed, SETTINGS | load | other))
    assert status == 1
    for difference in (
        "error on rank 0: the checkpoint is of another run: ",
        "seed was 1234 and is 99",
        "train_prompts_sha256 was '",
        "noise_level was 0.7 and is 0.5",
        "prompts_per_step was 4 and is 8",
        "model_sha256 was '",
        "Set them as they were, or start a new run",
    ):
        assert difference in text
    assert "Traceback" not in text
    assert files(pair.resumed / "run") == before


def test_a_run_resumed_at_its_last_iteration_ends_with_its_summary(pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of("one process")
    run = pair.unbroken / "run"
    earlier, lines = json.loads((run / "summary.json").read_text()), metrics(run)
    load = {"load": run / "checkpoints", "train_iters": 6}
    text = succeeded(flags(pair.unbroken, SETTINGS | load))
    assert "Finished: 6 iterations" in text
    summary = json.loads((run / "summary.json").read_text())
    times = ("seconds_total", "seconds_by_phase")
    assert {key: value for key, value in summary.items() if key not in times} == {
        key: value for key, value in earlier.items() if key not in times
    }
    assert summary["iterations"] == 6 and summary["held_out_reward_after"] is not None
    assert metrics(run) == lines
