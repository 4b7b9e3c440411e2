# SPDX-License-Identifier: Apache-2.0
"""The command line wins over a configuration file, a later file over an earlier one, and a file over the defaults;
nothing that is not a flag gets through; all that is wrong is told at once.

Does not cover the rules between flags (test_validate.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_engine.arguments import Settings, SettingsError, load_settings, parse_settings, settings_from_dict
from omni_engine.arguments.settings import CONCERNS, FLAGS

pytestmark = pytest.mark.fast


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(argv: list[str]) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_settings(argv)
    return str(caught.value)


def test_defaults_are_those_of_the_dataclasses(required: list[str]) -> None:
    settings = parse_settings(required)
    for field in dataclasses.fields(settings.rollout):
        assert getattr(settings.rollout, field.name) == field.default


def test_command_line_wins_over_files_and_files_over_defaults(tmp_path: Path, required: list[str]) -> None:
    first = write(tmp_path, "first.yaml", "height: 24\nwidth: 24\nlr: 1e-3\nsde_window_range: [1, 4]\n")
    second = write(tmp_path, "second.yaml", "width: 40\nsequence-parallel: true\n")
    settings = parse_settings([*required, "--config", first, second, "--lr", "0.5", "--no-sequence-parallel"])
    assert (settings.model.height, settings.model.width, settings.optimizer.lr) == (24, 40, 0.5)
    assert settings.parallel.sequence_parallel is False
    assert settings.rollout.sde_window_range == (1, 4)
    assert settings.rollout.prompts_per_step == FLAGS["prompts_per_step"].default


def test_required_flag_may_come_from_a_file(tmp_path: Path) -> None:
    config = write(tmp_path, "run.yaml", "model: m\ntrain_prompts: p.txt\n")
    assert parse_settings(["--config", config]).model.model == "m"


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["--hieght", "16"], "--height?"),
        (["--prompt-per-step=4"], "--prompts-per-step?"),
        (["--no-bf-16"], "--no-bf16?"),
        (["--qqqqqqq"], "See --help"),
    ],
)
def test_unknown_flag_names_the_nearest(required: list[str], arguments: list[str], nearest: str) -> None:
    assert nearest in refusal([*required, *arguments])


def test_flags_are_not_abbreviated(required: list[str]) -> None:
    assert "--heigh: no such flag" in refusal([*required, "--heigh", "16"])


def test_lone_argument_is_refused(required: list[str]) -> None:
    assert "'stray'" in refusal([*required, "--height", "16", "stray"])


def test_value_missing_at_the_end_is_refused(required: list[str]) -> None:
    assert "--height" in refusal([*required, "--height"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hieght: 16\n", "Did you mean --height?"),
        ("height: '16 px'\n", "whole number"),
        ("height: 1.5\n", "whole number"),
        ("bf16: 1\n", "true or false"),
        ("run_name: 7\n", "quotes"),
        ("sde_type: ode\n", "sde, cps, dance_sde"),
        ("model: {height: 16}\n", "str"),
        ("height: 16\nheight: 24\n", "more than once"),
        ("run_name: a\nrun-name: b\n", "more than once"),
        ("- height\n", "no mapping"),
        ("height: [\n", "not valid"),
        ("config: other.yaml\n", "no such flag"),
    ],
)
def test_fault_in_a_file_names_the_file(tmp_path: Path, required: list[str], text: str, message: str) -> None:
    config = write(tmp_path, "run.yaml", text)
    told = refusal([*required, "--config", config])
    assert message in told
    assert config in told


def test_unreadable_file_is_refused(tmp_path: Path, required: list[str]) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"run_name: \xe9\n")
    told = refusal([*required, "--config", str(tmp_path / "absent.yaml"), str(tmp_path / "latin.yaml")])
    assert "absent.yaml: cannot be read" in told
    assert "latin.yaml: is not UTF-8" in told


def test_empty_file_changes_nothing(tmp_path: Path, required: list[str]) -> None:
    assert parse_settings([*required, "--config", write(tmp_path, "empty.yaml", "# none\n")]) == parse_settings(
        required
    )


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    config = write(tmp_path, "run.yaml", "heigth: 16\nwidth: wide\n")
    told = refusal(["--config", config, "--lr", "-1", "--sde-type", "x", "--unknown-thing"])
    for part in ("heigth", "--width wide", "--lr -1", "--sde-type x", "--unknown-thing", "--model", "--train-prompts"):
        assert part in told
    assert told.startswith("7 settings are refused")


def test_faults_of_the_combination_join_those_of_the_command_line(required: list[str]) -> None:
    """A misspelt flag hides no indivisible batch; what hangs on a refused value is not judged."""
    flags = "--hieght 16 --micro-batch-size x --prompts-per-step 2 --samples-per-prompt 3 --height 20"
    with pytest.raises(SettingsError) as caught:
        load_settings([*required, *flags.split()], world_size=1)
    # the default of --micro-batch-size, 4, does not divide the 3 samples of an update: no fault of the user's
    assert sorted(fault.where.split()[0] for fault in caught.value.faults) == [
        "--height",
        "--hieght",
        "--micro-batch-size",
    ]


def test_world_size_is_that_of_torchrun(required: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [*required, "--tensor-model-parallel-size", "2"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    load_settings(argv)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SettingsError, match="3 processes"):
        load_settings(argv)


def test_saved_arguments_give_the_same_settings(tmp_path: Path, settings: Callable[..., Settings]) -> None:
    """`args.json` read back, by `settings_from_dict` and by --config, is the run it was saved by."""
    saved = settings(
        "--lr", "1e-5", "--negative-prompt", "é 😀 \x7f", "--eval-reward", "a", "b", "--lr-decay-iters", "9"
    )
    text = json.dumps(saved.to_dict())
    assert settings_from_dict(json.loads(text)) == saved
    assert parse_settings(["--config", write(tmp_path, "args.json", text)]) == saved


def test_saved_arguments_are_checked(settings: Callable[..., Settings]) -> None:
    plain = settings().to_dict()
    del plain["model"]
    with pytest.raises(SettingsError, match=r"--width(.|\n)*hieght(.|\n)*--model"):
        settings_from_dict(plain | {"hieght": 1, "width": "x"})


def test_every_concern_is_a_field_of_settings_and_every_name_is_unique() -> None:
    assert list(CONCERNS) == [field.name for field in dataclasses.fields(Settings)]
    assert len(FLAGS) == sum(len(dataclasses.fields(concern)) for concern in CONCERNS.values())


def test_help_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_settings(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert not [flag.option for flag in FLAGS.values() if flag.option not in shown]
