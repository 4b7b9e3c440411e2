# SPDX-License-Identifier: Apache-2.0
"""Invariant: a bad run ends by itself, with a status other than 0 and a message that says what is wrong, where, and
what to do; an earlier checkpoint is as it was and can be continued. All through scripts/pretrain_flowgrpo.sh.

Does not cover: several machines, faults of storage that report success, a process that hangs (--distributed-timeout-
minutes), scorers that fail (tests/reward), damaged checkpoints (tests/checkpoint).
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_engine.arguments import newest_iteration
from tests.helpers import ROOT
from tests.runs import MODEL, VALIDATION_PROMPTS, Job, finished, flags, iterations, metrics, succeeded

pytestmark = pytest.mark.timeout(2400)

ENDS_WITHIN = 60
"""Seconds from the death of a process to the end of the run: a promise to users, not a measure of speed."""
LONG = {"train_iters": 1000, "save_interval": 2}


def assert_told(text: str, *parts: str) -> None:
    """The message has all parts (regular expressions), and no traceback hides it."""
    for part in parts:
        assert re.search(part, text, re.DOTALL), f"{part!r} is not in:\n{text[-6000:]}"
    assert "Traceback" not in text, text[-6000:]


SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown flag": ({"train_itres": 3}, ("--train-itres: no such flag", "Did you mean --train-iters[?]")),
    "indivisible batch": (
        {"prompts_per_step": 3},
        ("--prompts-per-step 3", "cannot be shared evenly by 2 updates x 2 data-parallel ranks", "Use 4 as"),
    ),
    "micro-batch that does not fit": (
        {"micro_batch_size": 4},
        ("--micro-batch-size 4", "the 2 samples of a data-parallel rank", "Use one of 1, 2"),
    ),
    "no model": ({"model": "/nowhere"}, ("--model /nowhere: no such folder", "Give the folder of a downloaded")),
    "no prompt file": ({"train_prompts": "absent.txt"}, ("absent.txt: no such file", "Give a UTF-8 text file")),
}


@pytest.mark.parametrize("fault", SETTINGS)
def test_bad_settings_are_refused_before_anything_starts(fault: str, tmp_path: Path) -> None:
    changes, parts = SETTINGS[fault]
    status, text = finished(flags(tmp_path / "runs", changes), processes=2)
    assert status == 2
    assert_told(text, "1 setting is refused", *parts)
    assert not (tmp_path / "runs").exists()


def test_all_bad_settings_are_told_at_once(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    bad = {"train_itres": 3, "prompts_per_step": 3, "model": "/nowhere", "train_prompts": empty, "noise_level": "loud"}
    status, text = finished(flags(tmp_path / "runs", bad), processes=2)
    assert status == 2
    assert_told(
        text,
        "5 settings are refused",
        "--train-itres: no such flag",
        "--prompts-per-step 3 .*cannot be shared",
        "--model /nowhere: no such folder",
        "empty.txt: the file is empty. Give a UTF-8 text file",
        "--noise-level loud",
    )


def write_prompts(content: bytes) -> Callable[[Path, Path], None]:
    return lambda model, prompts: prompts.write_bytes(content) and None


def remove(part: str) -> Callable[[Path, Path], None]:
    return lambda model, prompts: (model / part).unlink()


def truncate(part: str) -> Callable[[Path, Path], None]:
    def harm(model: Path, prompts: Path) -> None:
        content = (model / part).read_bytes()
        (model / part).write_bytes(content[: len(content) // 2])

    return harm


TRANSFORMER, TEXT_ENCODER = "transformer/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"
FILES: dict[str, tuple[Callable[[Path, Path], None], tuple[str, ...]]] = {
    "prompts are blank": (write_prompts(b"\n  \n"), (r"prompts.txt: no prompt in this file; give a file with",)),
    "prompts are not UTF-8": (
        write_prompts('the text "12"\nZiffern, größer: "34"\n'.encode("latin-1")),
        (r"prompts.txt:2: not UTF-8 \(byte 0xf6 at offset 25.*convert the file.*iconv",),
    ),
    "the transformer is missing": (
        remove(TRANSFORMER),
        (rf"model/{TRANSFORMER} does not exist; the model folder is incomplete, copy or download it again",),
    ),
    "the transformer is truncated": (
        truncate(TRANSFORMER),
        (rf"model/{TRANSFORMER} cannot be read .*it may be truncated, copy it anew",),
    ),
    "the text encoder is truncated": (
        truncate(TEXT_ENCODER),
        (r"model: the text encoder, tokenizer or autoencoder cannot be loaded .*truncated: copy or download the",),
    ),
}


@pytest.mark.parametrize("fault", FILES)
def test_a_file_at_fault_is_named_with_the_remedy(fault: str, tmp_path: Path) -> None:
    harm, parts = FILES[fault]
    model, prompts = tmp_path / "model", tmp_path / "prompts.txt"
    shutil.copytree(MODEL, model)
    shutil.copy(VALIDATION_PROMPTS, prompts)
    harm(model, prompts)
    status, text = finished(flags(tmp_path / "runs", {"model": model, "train_prompts": prompts}))
    assert status == 1
    assert_told(text, "error on rank 0: ", *parts, "The run has failed: rank 0 ended with status 1; see above")
    assert metrics(tmp_path / "runs" / "run") == []


def contents(folder: Path) -> dict[str, str]:
    """Digest of every file below a folder."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def start_and_save(job: Job, run: Path) -> dict[str, str]:
    """Wait until a long run is in the iteration after the first one past a save; digests of its first checkpoint."""
    job.wait_until(lambda: iterations(run) >= 3)
    return contents(run / "checkpoints" / "iter_0000002")


def assert_earlier_checkpoint_is_left(run: Path, text: str, before: dict[str, str]) -> None:
    """What was saved is unchanged, the message names the newest checkpoint, and one iteration more can be trained from
    it, in one process."""
    checkpoints = run / "checkpoints"
    last = newest_iteration(checkpoints)
    assert last is not None and last >= 2
    assert before and contents(checkpoints / "iter_0000002") == before
    left = f"The last whole checkpoint is iteration {last}: continue with --load {checkpoints}"
    assert_told(text, rf"rank \d.*\n{left}", f"The run has failed: .*{left}")
    told = succeeded(flags(run.parent, {"train_iters": last + 1, "load": checkpoints}))
    assert f"Finished: {last + 1} iterations" in told
    assert newest_iteration(checkpoints) == iterations(run) == last + 1


def assert_nothing_runs(family: dict[int, psutil.Process]) -> None:
    """Scorers notice within seconds that their trainer is gone."""
    _, alive = psutil.wait_procs(list(family.values()), timeout=30)
    assert not alive


@pytest.mark.parametrize("what", ["checkpoint", "metrics"])
def test_a_full_disk_ends_the_run_and_leaves_the_earlier_checkpoint(what: str, tmp_path: Path) -> None:
    """A limit on the size of files, set while the run goes on, works for any user. The checkpoint is written by both
    ranks, the metrics by rank 0 alone, so that the other one has to learn of it."""
    run = tmp_path / "run"
    with Job(flags(tmp_path, LONG), processes=2) as job:
        before = start_and_save(job, run)
        limit = 200_000 if what == "checkpoint" else (run / "metrics.jsonl").stat().st_size
        family = job.family()
        for rank in job.ranks().values():
            resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (limit, limit))
        status, text = job.end(), job.text
    assert status == 1
    told = {
        "checkpoint": (
            rf"error on rank \d: the checkpoint of iteration \d+ cannot be written to {run}/checkpoints "
            r"\(free space there or choose another --save; earlier checkpoints are untouched\).*File too large",
        ),
        "metrics": (
            f"error on rank 0: could not append to {run}/metrics.jsonl: File too large. Remedy: check the disk",
        ),
    }
    assert_told(text, *told[what], r"The run has failed: rank \d ended with status 1; see above\.")
    assert_nothing_runs(family)
    assert not list((run / "checkpoints").glob(".*"))  # of the checkpoint that failed nothing takes up room
    assert_earlier_checkpoint_is_left(run, text, before)


def test_a_save_folder_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    run, save = tmp_path / "run", tmp_path / "saves" / "here"
    with Job(flags(tmp_path, LONG | {"save": save, "save_interval": 5})) as job:
        job.wait_until(lambda: iterations(run) >= 1)
        save.parent.write_text("a file where the folder should be")
        status, text = job.end(), job.text
    assert status == 1
    assert_told(
        text,
        rf"error on rank 0: the checkpoint of iteration 5 cannot be written to {save} \(free space there or choose "
        r"another --save; earlier checkpoints are untouched\)",
        f"There is no checkpoint in {save} yet",
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run_in_time_and_leaves_the_earlier_checkpoint(victim: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Job(flags(tmp_path, LONG), processes=2) as job:
        before = start_and_save(job, run)
        family, ranks = job.family(), job.ranks()
        assert len(family) == 5  # the launcher, two ranks, a scorer of each
        ranks[victim].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        status, text = job.end(within=ENDS_WITHIN), job.text
        print(f"ended {time.monotonic() - killed:.1f} s after the death of rank {victim}")
    assert status == 128 + signal.SIGKILL
    assert_told(
        text,
        rf"rank {1 - victim} (lost another process of the run|was stopped by SIGTERM: another process)",
        rf"The run has failed: rank {victim} \(process {ranks[victim].pid}\) was killed by SIGKILL.*memory",
    )
    assert_nothing_runs(family)
    assert_earlier_checkpoint_is_left(run, text, before)


PEERS = """
import os, signal, sys, torch
from omni_engine.platform import get_platform
torch.distributed.init_process_group(get_platform().dist_backend)
ones = torch.ones(9, device=get_platform().device())
torch.distributed.all_reduce(ones)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
try:
    torch.distributed.all_reduce(ones)
except Exception as error:
    sys.exit(0 if get_platform().is_lost_peer(error) else f"not taken for a lost peer: {error!r}")
sys.exit("the dead peer has answered")
"""


def test_a_survivor_knows_that_it_lost_a_peer() -> None:
    """Without torchrun, whose SIGTERM may come first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", PEERS], cwd=ROOT, env=shared | {"RANK": str(rank), "OMNI_PLATFORM": "cpu"}
        )
        for rank in (0, 1)
    ]
    try:
        assert [peer.wait(300) for peer in peers] == [0, -signal.SIGKILL]
    finally:
        for peer in peers:
            peer.kill()


def test_a_run_that_is_stopped_says_where_it_continues(tmp_path: Path) -> None:
    """As a scheduler stops it: the launcher alone is told."""
    with Job(flags(tmp_path, LONG)) as job:
        start_and_save(job, tmp_path / "run")
        family = job.family()
        job.process.terminate()
        status, text = job.end(within=ENDS_WITHIN), job.text
    assert status == 128 + signal.SIGTERM
    assert_told(
        text, "rank 0 was stopped by SIGTERM", r"The run was stopped by SIGTERM\. .* iteration \d+: continue with"
    )
    assert_nothing_runs(family)
