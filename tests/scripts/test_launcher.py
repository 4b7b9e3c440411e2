# SPDX-License-Identifier: Apache-2.0
"""`scripts/pretrain_flowgrpo.sh` hands torchrun what was asked for: the quick start only when no model and no
configuration is named, torchrun's usual variables, and the caller's flags last, so that they win.

The interpreter is a stub that prints its arguments. Does not cover the training itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.fast

STUB = """#!/usr/bin/env bash
if [[ "$2" == omni_engine.arguments ]]; then
    echo "checked for $WORLD_SIZE processes"
    exit "${CHECK_STATUS:-0}"
fi
echo "in $PWD: $*"
"""


def launch(tmp_path: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    usual = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in usual}
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "pretrain_flowgrpo.sh"), *flags],
        cwd=tmp_path,
        env=environment | {"OMNI_PYTHON": str(stub)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 2), (64, 2)])
def test_without_arguments_it_is_the_quick_start_on_up_to_two_cores(tmp_path: Path, cores: int, processes: int) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "env"):  # without nvidia-smi and npu-smi
        (tools / name).symlink_to(str(shutil.which(name)))
    (tools / "nproc").write_text(f"#!/usr/bin/env bash\necho {cores}\n")
    (tools / "nproc").chmod(0o755)
    out = launch(tmp_path, PATH=str(tools)).stdout
    assert f"checked for {processes} processes" in out
    assert f"in {ROOT}: -m omni_engine.launch --nproc-per-node {processes} --standalone" in out
    assert out.rstrip().endswith("-m omni_engine.pretrain_flowgrpo --config configs/recipes/quick_start.yaml")


def test_other_flags_change_the_quick_start(tmp_path: Path) -> None:
    out = launch(tmp_path, "--train-iters", "5").stdout
    assert out.rstrip().endswith("--config configs/recipes/quick_start.yaml --train-iters 5")


@pytest.mark.parametrize("flags", [("--model", "m"), ("--model=m",), ("--config", "c.yaml"), ("--config=c.yaml",)])
def test_own_model_or_configuration_takes_nothing_from_the_quick_start(tmp_path: Path, flags: tuple[str, ...]) -> None:
    out = launch(tmp_path, *flags).stdout
    assert "quick_start" not in out
    assert f"in {tmp_path}: " in out
    assert out.rstrip().endswith(f"-m omni_engine.pretrain_flowgrpo {' '.join(flags)}")


def test_flag_that_only_begins_like_model_keeps_the_quick_start(tmp_path: Path) -> None:
    assert "quick_start.yaml" in launch(tmp_path, "--model-family", "qwen_image").stdout


def test_several_machines_follow_the_usual_variables(tmp_path: Path) -> None:
    variables = {"NPROC_PER_NODE": "4", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1234"}
    out = launch(tmp_path, **variables).stdout
    assert "checked for 8 processes" in out
    assert "--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr host --master-port 1234" in out
    assert "--standalone" not in out


def test_refused_settings_start_nothing(tmp_path: Path) -> None:
    finished = launch(tmp_path, CHECK_STATUS="2")
    assert finished.returncode == 2
    assert "omni_engine.launch" not in finished.stdout


def test_help_starts_no_processes(tmp_path: Path) -> None:
    assert launch(tmp_path, "--help").stdout == f"in {tmp_path}: -m omni_engine.pretrain_flowgrpo --help\n"


def test_missing_environment_is_explained(tmp_path: Path) -> None:
    finished = launch(tmp_path, OMNI_PYTHON=str(tmp_path / "absent"))
    assert finished.returncode == 1
    assert "scripts/setup.sh" in finished.stderr


@pytest.mark.parametrize(
    ("variables", "flags", "message"),
    [
        ({"OMNI_PYTHON": "absent-python"}, (), "no such program"),
        ({"OMNI_REQUIREMENTS": "tpu"}, (), "choose cpu, cuda or npu"),
        ({}, ("--develop",), "no such option"),
    ],
)
def test_setup_refuses_what_it_does_not_know(variables: dict[str, str], flags: tuple[str, ...], message: str) -> None:
    finished = subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup.sh"), *flags],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 1
    assert message in finished.stderr


def test_setup_names_the_packages_that_an_interpreter_lacks(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" -S "$@"\n')  # -S: without site-packages
    bare.chmod(0o755)
    finished = subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup.sh")],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMNI_PYTHON": str(bare)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 1
    assert "megatron.core: No module named" in finished.stderr
    assert "-m pip install -r requirements/" in finished.stderr
