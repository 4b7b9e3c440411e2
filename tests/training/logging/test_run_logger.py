# SPDX-License-Identifier: Apache-2.0
"""Rank 0 leaves the whole record of a run, the other ranks nothing, and a resumed run continues the record.

Does not cover the real Weights & Biases service (a stand-in takes its place), nor how the pictures look.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_engine.arguments.logging import LoggingSettings
from omni_engine.training.logging import LoggingError, RunLogger, open_run_directory, summarize
from omni_engine.training.logging.metrics_file import read_records

pytestmark = pytest.mark.fast

IMAGES = np.zeros((2, 16, 32, 3), np.uint8)
PROMPTS = ["one", "two"]


def _settings(**changes: Any) -> LoggingSettings:
    return LoggingSettings(**({"tensorboard": False, "progress_bar": "never"} | changes))


def _train(logger: RunLogger, first: int, last: int) -> None:
    for iteration in range(first, last + 1):
        logger.log(iteration, {"reward/mean": iteration / 3}, last)
        logger.log_eval(iteration, {"reward": iteration / 7}, IMAGES, PROMPTS)


def test_rank_0_leaves_the_whole_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = open_run_directory(tmp_path / "a", rank=0)
    logger = RunLogger(directory, _settings(), 0)
    logger.log_eval(0, {"reward": 0.0}, IMAGES, PROMPTS)
    _train(logger, 1, 2)
    logger.finish(summarize(logger.history, layout={"dp": 1}, seed=1, images_per_iteration=4))
    logger.close()
    logger.close()
    assert json.loads(directory.summary.read_text())["held_out_reward_after"] == 2 / 7
    for picture in (directory.curve, directory.before, directory.after, directory.samples(2)):
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert directory.before.read_bytes() == directory.samples(0).read_bytes()
    assert directory.after.read_bytes() == directory.samples(2).read_bytes()
    printed = capsys.readouterr().out
    assert printed.count(" iteration        ") == 5 and str(directory.curve) in printed


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = RunLogger(open_run_directory(tmp_path / "a", rank=1), _settings(wandb_project="x"), 1)
    logger.start(0, 2)
    logger.phase("rollout")
    logger.message("hello")
    _train(logger, 1, 2)
    logger.finish(summarize(logger.history, layout={}, seed=1, images_per_iteration=4))
    logger.close()
    assert not list(tmp_path.iterdir()) and capsys.readouterr() == ("", "")


def test_a_resumed_record_equals_the_unbroken_one(tmp_path: Path) -> None:
    unbroken = open_run_directory(tmp_path / "unbroken", rank=0)
    _train(RunLogger(unbroken, _settings(), 0), 1, 3)
    broken = open_run_directory(tmp_path / "broken", rank=0)
    _train(RunLogger(broken, _settings(), 0), 1, 2)
    broken.summary.write_text("{}")
    resumed = open_run_directory(tmp_path / "broken", rank=0, resumed_iteration=1)
    logger = RunLogger(resumed, _settings(), 0, resumed_iteration=1)
    assert not resumed.summary.exists(), "an unfinished run shows the summary of its past"
    _train(logger, 2, 3)
    assert resumed.metrics.read_bytes() == unbroken.metrics.read_bytes()
    assert list(logger.history) == read_records(unbroken.metrics)


def test_the_metrics_file_has_every_iteration_and_the_log_every_interval_and_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = open_run_directory(tmp_path / "a", rank=0)
    logger = RunLogger(directory, _settings(log_interval=2), 0)
    for iteration in range(1, 6):
        logger.log(iteration, {"rollout/failed_samples": 1.0}, 5)
    assert len(read_records(directory.metrics)) == 5
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("iteration")[1].split("/")[0].strip() for line in lines] == ["2", "4", "5"]
    assert [line.split("failed samples:")[1].strip(" |") for line in lines] == ["2", "2", "1"]


def test_tensorboard_gets_scalars_and_pictures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = open_run_directory(tmp_path / "a", rank=0)
    logger = RunLogger(directory, _settings(tensorboard=True), 0)
    logger.log(1, {"reward/mean": 0.5}, 2)
    events = EventAccumulator(str(directory.tensorboard)).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1], "not flushed"
    logger.log_eval(1, {"reward": 0.25}, IMAGES, PROMPTS)
    assert [event.value for event in events.Reload().Scalars("eval/reward")] == [0.25]
    assert [event.step for event in events.Images("eval/pictures")] == [1]
    logger.close()


def test_a_missing_dashboard_package_is_an_error_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = open_run_directory(tmp_path / "a", rank=0)
    for package, settings in (("wandb", _settings(wandb_project="x")), ("tensorboard", _settings(tensorboard=True))):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(LoggingError, match=f"Remedy: pip install {package}"):
            RunLogger(directory, settings, 0)


def test_wandb_places_metrics_by_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    run = types.SimpleNamespace(
        log=logged.append, define_metric=lambda *_, **__: None, finish=lambda: logged.append({"finished": True})
    )
    wandb = types.SimpleNamespace(init=lambda **_: run, Image=lambda picture: picture.shape)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    logger = RunLogger(open_run_directory(tmp_path / "a", rank=0), _settings(wandb_project="x"), 0)
    _train(logger, 1, 1)
    logger.close()
    assert logged[0] == {"iteration": 1, "reward/mean": 1 / 3}
    assert logged[1] == {"iteration": 1, "eval/reward": 1 / 7}
    assert logged[2]["iteration"] == 1 and len(logged[2]["eval/pictures"]) == 3
    assert logged[-1] == {"finished": True}


def test_evaluations_that_do_not_compare_are_refused(tmp_path: Path) -> None:
    logger = RunLogger(open_run_directory(tmp_path / "a", rank=0), _settings(), 0)
    with pytest.raises(ValueError, match="reward"):
        logger.log_eval(0, {"strict": 0.5}, IMAGES, PROMPTS)
    logger.log_eval(0, {"reward": 0.5}, IMAGES, PROMPTS)
    with pytest.raises(ValueError, match="changed"):
        logger.log_eval(1, {"reward": 0.5}, IMAGES, ["one", "three"])


def test_the_progress_bar_shares_the_screen_with_the_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = RunLogger(open_run_directory(tmp_path / "a", rank=0), _settings(progress_bar="always"), 0)
    logger.start(0, 2)
    logger.phase("old_log_prob")
    logger.log(1, {"reward/mean": 0.5}, 2)
    logger.log(2, {"reward/mean": 0.5}, 2)
    logger.close()
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2 and "\r" not in captured.out
    assert "old log prob" in captured.err and "2/2" in captured.err
