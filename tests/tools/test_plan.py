# SPDX-License-Identifier: Apache-2.0
"""Invariant: the planner proposes layouts that the engine takes, each with flags that ask for exactly it; it recommends
the fastest that fits, and where none fits says which is closest and what to do.

Does not cover the formulas (tests/models/test_costs.py) nor the times, which rest on assumed rates.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from omni_engine.arguments import Settings, validate
from omni_engine.arguments.parser import parse_settings
from omni_engine.models.costs import Layout
from tools import plan
from tools.planner.job import PUBLISHED_COMPONENTS, components_bytes

ROOT = Path(__file__).parents[2]
TINY = ROOT / "assets" / "qwen_image_tiny"
PROMPTS = ROOT / "assets" / "prompts" / "digits_train.txt"
JOB = ["--height", "16", "--width", "32", "--no-bf16", "--reserved-gb", "0", "--samples", "128", "--text-tokens", "16"]


def rows(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[dict]]:
    """Exit status and the layouts of a run with --json."""
    status = plan.main([*map(str, arguments), "--json"])
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(scope="module")
def tiny() -> list[object]:
    return ["--model", TINY, "--devices", 4, "--device-memory-gb", 1, *JOB]


def settings_of(flags: str) -> Settings:
    """The engine's settings for a layout."""
    line = f"--model {TINY} --height 16 --width 32 --train-prompts {PROMPTS} --micro-batch-size 4 "
    line += "--prompts-per-step 8 --samples-per-prompt 16 --reward ocr --no-tensorboard "
    return parse_settings(shlex.split(line + flags))


def test_every_layout_is_one_that_the_engine_takes(capsys: pytest.CaptureFixture[str], tiny: list[object]) -> None:
    status, found = rows(capsys, *tiny)
    assert status == 0 and len(found) > 50
    for row in found:
        settings = settings_of(row["flags"])
        assert validate(settings, world_size=4) == [], row["flags"]
        layout = Layout(settings.parallel, settings.parallel.data_parallel_size(4)).describe()
        assert (layout, settings.model.recompute_granularity) == (row["layout"], row["recompute"])
    assert len({(row["layout"], row["recompute"]) for row in found}) == len(found)
    named = " ".join(row["layout"] for row in found)
    for part in ("TP2", "+SP", "Ulysses2", "Ring2", "PP4", "PP2xVPP2", "DP4", "distributed optimizer"):
        assert part in named


def test_the_fastest_that_fits_is_recommended(capsys: pytest.CaptureFixture[str], tiny: list[object]) -> None:
    status, found = rows(capsys, *tiny)
    assert status == 0 and [row["recommended"] for row in found].count(True) == 1 and found[0]["recommended"]
    fitting = [row for row in found if row["fits"]]
    assert found[: len(fitting)] == fitting
    assert found[0]["seconds"]["total"] == min(row["seconds"]["total"] for row in fitting)
    for row in found:
        parts = dict(row["memory_bytes"])
        total, step = parts.pop("total"), min(parts["activations"], parts["optimizer_step"])
        assert total == pytest.approx(sum(parts.values()) - step, abs=len(parts))
        assert row["fits"] == (total <= row["usable_bytes"])
    assert plan.main([*map(str, tiny), "--top", "3"]) == 0
    shown = capsys.readouterr().out
    assert f"Recommended: {found[0]['layout']}, recompute {found[0]['recompute']}" in shown
    assert found[0]["flags"] in shown


def test_where_nothing_fits_the_closest_is_named_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "qwen-image", "--devices", "2", "--device-memory-gb", "80", "--tp", "2"]
    status, found = rows(capsys, *model)
    assert status == 1 and not any(row["fits"] for row in found)
    assert plan.main(model) == 1
    shown = capsys.readouterr().out
    assert f"The closest is {found[0]['layout']}" in shown and "--lora-rank 64" in shown
    adapters = rows(capsys, *model, "--lora-rank", 64)
    assert adapters[0] == 0 and adapters[1][0]["fits"]


@pytest.mark.fast
def test_published_full_fine_tune_on_four_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """The arithmetic of docs/performance.md: 18 bytes a weight over four ranks, and the text encoder on one."""
    _, found = rows(capsys, "--model", "qwen-image", "--devices", 4, "--device-memory-gb", 141, "--tp", 4)
    row = next(row for row in found if row["layout"] == "TP4+SP" and row["recompute"] == "selective")
    parts = row["memory_bytes"]
    assert row["fits"]
    state = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert state == pytest.approx(18 * 20.43e9 / 4, rel=0.005)
    assert parts["components"] == PUBLISHED_COMPONENTS["qwen-image"] and parts["rollout_copy"] == 0


@pytest.mark.fast
def test_frozen_components_are_read_from_headers(tmp_path: Path) -> None:
    for part, dtype in (("text_encoder", torch.bfloat16), ("vae", torch.bfloat16)):
        (tmp_path / part).mkdir()
        save_file(
            {"weight": torch.zeros(30, dtype=dtype), "bias": torch.zeros((), dtype=dtype)},
            tmp_path / part / "a.safetensors",
        )
    assert components_bytes(tmp_path) == 2 * 31 + 4 * 31, "diffusers loads an autoencoder in float32"
    (tmp_path / "vae" / "a.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"a\.safetensors: the header"):
        components_bytes(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--model", "nowhere"], "nowhere: no such folder.*qwen-image"),
        (["--samples", "60"], "no whole groups.*use 48"),
        (["--micro-batch-size", "7"], "no layout of 4 devices takes this job.*--micro-batch-size"),
        (["--tp", "3"], "with --tp 3 takes this job"),
        (["--height", "17"], "multiples of"),
    ],
)
def test_a_job_that_cannot_be_planned_is_refused(
    capsys: pytest.CaptureFixture[str], tiny: list[object], changes: list[str], message: str
) -> None:
    assert plan.main([*map(str, tiny), *changes]) == 2
    assert re.search(message, capsys.readouterr().err)
