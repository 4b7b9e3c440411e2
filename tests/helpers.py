# SPDX-License-Identifier: Apache-2.0
"""What tests of several parts call: running a program under torchrun, with nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


def run_torchrun(
    program: str | Path,
    nproc: int,
    *args: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    cwd: str | Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Runs a program in `nproc` processes on this machine and waits for its end, whatever its exit status.

    Args:
        program: a path that ends in `.py`, or the dotted name of a module.
        nproc: number of processes.
        args: arguments of the program.
        env: environment variables on top of this process's own.
        timeout: seconds until every process is killed.
        cwd: folder to run in, the repository's by default.

    Returns:
        The finished torchrun with stdout and stderr as text; those of all ranks are in them.

    Raises:
        AssertionError: the time is up; the message ends with what the ranks had written.
    """
    # --standalone lets torchrun itself bind a free port, so no other program can take it in between.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    target = [str(program)] if str(program).endswith(".py") else ["-m", str(program)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(
        [*launcher, "--nproc-per-node", str(nproc), *target, *args],
        cwd=cwd,
        env=environment | dict(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        stdout, stderr = process.communicate()
        raise AssertionError(
            f"{program} on {nproc} processes did not end in {timeout} s.\n{stdout[-4000:]}\n{stderr[-4000:]}"
        ) from None
    except BaseException:  # an interrupted test leaves no ranks behind either
        kill_tree(process.pid)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def kill_tree(pid: int) -> None:
    """Kills a process of ours and its descendants. torchrun starts each rank in a session of its own, so killing its
    process group would miss them."""
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=10)
