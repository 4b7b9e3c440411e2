# SPDX-License-Identifier: Apache-2.0
"""Settings that cannot run are refused, each for its own reason and with a remedy that works; settings that can run
are not.

Does not cover the lines of prompt files, the names of scorers, or whether a platform is present (their own parts).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_engine.arguments import Settings, validate

pytestmark = pytest.mark.fast

Make = Callable[..., Settings]


def test_defaults_are_sound_on_one_process(settings: Make) -> None:
    assert validate(settings(), world_size=1) == []


SOUND = {
    "two replicas": ("--micro-batch-size 48", 2),
    "all of the batch in one update": ("--updates-per-rollout 1 --micro-batch-size 192", 1),
    "tensor and sequence parallel": ("--tensor-model-parallel-size 4 --sequence-parallel", 8),
    "tokens that do not divide": ("--sequence-parallel --tensor-model-parallel-size 3", 3),
    "Ulysses and ring": ("--ulysses-degree 4 --ring-degree 2 --tensor-model-parallel-size 2", 16),
    "a ring shares no heads": ("--ring-degree 5", 5),
    "virtual stages": ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3", 2),
    "stages by hand": (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-layout 1 2 2 1",
        2,
    ),
    "as many stages as blocks": ("--pipeline-model-parallel-size 6", 6),
    "sde reaches the last step": ("--sde-window-range 8 10", 1),
    "cps before the last step": ("--sde-type cps --sde-window-range 7 9", 1),
    "no spread to divide by": ("--advantage-std none --advantage-epsilon 0", 1),
    "adapters and their average": ("--lora-rank 4 --ema-decay 0.9 --eval-weights ema --export-weights ema", 1),
    "two scorers": ("--reward a b --reward-weights 1 0.5 --eval-reward c", 1),
}


@pytest.mark.parametrize("case", SOUND)
def test_sound_settings_pass(settings: Make, case: str) -> None:
    flags, world_size = SOUND[case]
    assert validate(settings(*flags.split()), world_size) == []


# case: (flags, processes, flags that the fault names first, what the remedy offers)
REFUSED = {
    "nothing to merge": ("--export-merged --export-hf out", 1, "--export-merged", "--lora-rank above 0"),
    "merge without an export": ("--export-merged --lora-rank 4", 1, "--export-merged", "--export-hf"),
    "no average to evaluate": ("--eval-weights ema", 1, "--eval-weights", "--ema-decay"),
    "no average to export": ("--export-weights ema", 1, "--export-weights", "--export-weights policy"),
    "pixels": ("--height 20", 1, "--height", "16 or 24"),
    "processes": ("--tensor-model-parallel-size 2", 3, "--tensor-model-parallel-size", "2 or 4"),
    "heads": ("--tensor-model-parallel-size 5", 5, "--tensor-model-parallel-size", "1, 2, 3, 4, 6, 8, 12, 24"),
    "stages": ("--pipeline-model-parallel-size 7", 7, "--pipeline-model-parallel-size", "at most 6"),
    "sequence of one rank": ("--sequence-parallel", 1, "--sequence-parallel", "--no-sequence-parallel"),
    "Ulysses of heads": ("--ulysses-degree 5", 5, "--ulysses-degree", "1, 2, 3, 4, 6, 8, 12, 24"),
    "Ulysses of a rank's heads": (
        "--ulysses-degree 16 --tensor-model-parallel-size 2",
        32,
        "--ulysses-degree",
        "1, 2, 3, 4, 6, 12 as",
    ),
    "replicas of USP": ("--ulysses-degree 2 --ring-degree 2", 6, "--tensor-model-parallel-size", "4 or 8"),
    "virtual stages of one": (
        "--num-virtual-stages-per-pipeline-rank 2",
        1,
        "--num-virtual-stages-per-pipeline-rank",
        "--pipeline-model-parallel-size 2",
    ),
    "virtual stages": (
        "--num-virtual-stages-per-pipeline-rank 4 --pipeline-model-parallel-size 2",
        2,
        "--num-virtual-stages-per-pipeline-rank",
        "at most 1 of 4",
    ),
    "groups of micro-batches": (
        "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 3 --micro-batch-size 12",
        3,
        "--num-virtual-stages-per-pipeline-rank",
        "1, 2, 4, 8, 16, 32 as --micro-batch-size",
    ),
    "layout of other stages": (
        "--pipeline-layout 3 3 --pipeline-model-parallel-size 3",
        3,
        "--pipeline-layout",
        "blocks of every stage",
    ),
    "layout of other blocks": (
        "--pipeline-layout 3 4 --pipeline-model-parallel-size 2",
        2,
        "--pipeline-layout",
        "to 6",
    ),
    "prompts": ("--prompts-per-step 15", 1, "--prompts-per-step", "14 or 16"),
    "prompts of replicas": ("--prompts-per-step 6", 2, "--prompts-per-step", "4 or 8"),
    "updates": ("--updates-per-rollout 3", 1, "--prompts-per-step", "1, 2, 4, 8, 16"),
    "micro-batches": ("--micro-batch-size 36", 1, "--micro-batch-size", "1, 2, 3, 4, 6, 8"),
    "empty range": ("--sde-window-range 5 5", 1, "--sde-window-range", "5 7"),
    "range past the steps": ("--num-inference-steps 4", 1, "--sde-window-range", "at most 4"),
    "window too wide": ("--sde-window-size 6", 1, "--sde-window-range", "--sde-window-size 5"),
    "window too wide for a late range": (
        "--sde-window-range 3 5 --sde-window-size 3",
        1,
        "--sde-window-range",
        "size 2",
    ),
    "last step of cps": ("--sde-type cps --sde-window-range 5 10", 1, "--sde-window-range", "at most 9"),
    "noise of cps": ("--sde-type cps --noise-level 1.2", 1, "--noise-level", "at most 1"),
    "spread of zero": ("--advantage-epsilon 0", 1, "--advantage-std", "1e-4"),
    "lowest rate": ("--lr 1e-4 --min-lr 1e-3", 1, "--min-lr", "at most 0.0001"),
    "warm-up": ("--lr-warmup-iters 100", 1, "--lr-warmup-iters", "at most 99"),
    "warm-up of the decay": ("--lr-warmup-iters 9 --lr-decay-iters 8", 1, "--lr-warmup-iters", "at most 7"),
    "weights": ("--reward a b", 1, "--reward", "--reward-weights 1 1"),
    "weights of nothing": ("--reward-weights 0", 1, "--reward-weights", "other than 0"),
    "scorer twice": ("--reward a --eval-reward a", 1, "--reward", "once"),
    "no model": ("--model absent", 1, "--model", "folder"),
    "no training prompts": ("--train-prompts absent.txt", 1, "--train-prompts", "one prompt a line"),
    "no held-out prompts": ("--eval-prompts absent.txt", 1, "--eval-prompts", "one prompt a line"),
    "nothing to resume": ("--load absent", 1, "--load", "--save"),
    "name with a slash": ("--run-name a/b", 1, "--run-name", "--runs-dir"),
    "Weights & Biases": ("--wandb-project p", 1, "--wandb-project", "pip install wandb"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsound_settings_are_refused_with_a_remedy(settings: Make, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    flags, world_size, where, remedy = REFUSED[case]
    faults = validate(settings(*flags.split()), world_size)
    assert len(faults) == 1, faults
    assert faults[0].where.startswith(where + " ")
    assert remedy in faults[0].remedy


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("--prompts-per-step 15", 1),
        ("--prompts-per-step 15", 4),
        ("--updates-per-rollout 5", 1),
        ("--prompts-per-step 3 --updates-per-rollout 8", 2),
        ("--micro-batch-size 7", 2),
    ],
)
def test_numbers_offered_for_the_batch_are_accepted(settings: Make, flags: str, world_size: int) -> None:
    """Whatever the remedy offers for a batch divides it."""
    (fault,) = validate(settings(*flags.split()), world_size)
    offers = re.findall(r"((?:\d+(?:, | or )?)+) as (--[a-z-]+)", fault.remedy)
    assert offers
    for numbers, option in offers:
        for number in re.findall(r"\d+", numbers):
            changed = settings(*flags.split(), option, number)
            assert [one for one in validate(changed, world_size) if one.names[0] != "micro_batch_size"] == []


def test_model_folder_without_an_index_is_refused(settings: Make, model_folder: Path) -> None:
    (model_folder / "model_index.json").unlink()
    (fault,) = validate(settings(), world_size=1)
    assert "model_index.json" in fault.what


def test_unreadable_part_of_the_model_folder_is_left_to_the_loader(settings: Make, model_folder: Path) -> None:
    (model_folder / "transformer" / "config.json").write_text("{")
    (model_folder / "vae" / "config.json").unlink()
    assert validate(settings("--height", "20", "--tensor-model-parallel-size", "5"), world_size=5) == []


def test_empty_prompt_file_is_refused(settings: Make, tmp_path: Path) -> None:
    (tmp_path / "none.txt").touch()
    (fault,) = validate(settings("--eval-prompts", str(tmp_path / "none.txt")), world_size=1)
    assert "empty" in fault.what


@pytest.mark.parametrize("flag", ["--save", "--export-hf", "--runs-dir"])
def test_output_below_a_file_is_refused(settings: Make, tmp_path: Path, flag: str) -> None:
    (fault,) = validate(settings(flag, str(tmp_path / "prompts.txt" / "deeper")), world_size=1)
    assert fault.where.startswith(flag)
    assert "is a file" in fault.what


def test_nothing_is_created_by_looking(settings: Make, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    validate(settings("--save", str(tmp_path / "new"), "--export-hf", str(tmp_path / "other")), world_size=1)
    assert sorted(tmp_path.rglob("*")) == before


def test_resuming_needs_the_tracker_file(settings: Make, tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints"
    saved.mkdir()
    assert len(validate(settings("--load", str(saved)), world_size=1)) == 1
    (saved / "latest_checkpointed_iteration.txt").write_text("3")
    assert validate(settings("--load", str(saved)), world_size=1) == []


def test_every_fault_is_listed(settings: Make) -> None:
    flags = "--height 20 --width 20 --prompts-per-step 15 --reward a b --min-lr 1 --sde-window-size 9"
    assert len(validate(settings(*flags.split()), world_size=1)) == 6


def test_settings_made_in_code_are_checked_as_flags_are(settings: Make) -> None:
    """A refused value is told once, by its own flag; nothing divides by it, nor is its default judged in its place."""
    made = settings("--samples-per-prompt", "3", "--prompts-per-step", "2")
    made = dataclasses.replace(
        made,
        optimizer=dataclasses.replace(made.optimizer, micro_batch_size=0),
        rollout=dataclasses.replace(made.rollout, sde_type="ode"),
    )
    assert [fault.names for fault in validate(made, world_size=1)] == [("sde_type",), ("micro_batch_size",)]
