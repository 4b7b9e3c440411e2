# SPDX-License-Identifier: Apache-2.0
"""Runs the jobs of policy_jobs.py: of one process here, of several by policy_worker.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from omni_engine.parallel import ParallelGroups
from tests.distributed.launches import Launches
from tests.distributed.policy_jobs import JOBS
from tests.distributed.policy_worker import run
from tools.bench.parity import Rank, errors, whole, worst
from tools.bench.tiny_engine import Setup, build_engine, make_folder

WORKER = Path(__file__).with_name("policy_worker.py")


class PolicyRuns:
    """What the jobs of these names end with, on one model."""

    def __init__(self, folder: Path, layers: int, names: Sequence[str], alone: ParallelGroups, timeout: float):
        self.folder, self.alone = make_folder(folder, layers), alone
        self.of_one: dict[str, list[Rank]] = {}
        processes = {JOBS[name].layout.processes for name in names}
        arguments = {n: [name for name in names if JOBS[name].layout.processes == n] for n in processes}
        self.launches = Launches(WORKER, folder, arguments, timeout)

    def ranks(self, name: str) -> list[Rank]:
        """What the ranks of a job have."""
        if JOBS[name].layout.processes > 1:
            return self.launches.ranks(JOBS[name].layout.processes, name, "run")
        if name not in self.of_one:
            engine = build_engine(self.folder, self.alone, Setup())
            self.of_one[name] = [Rank(dict.fromkeys(("tp", "cp", "pp", "dp"), 0), {}, run(engine, JOBS[name]))]
        return self.of_one[name]

    def check(self, name: str, expected: str, tolerance: float) -> None:
        """Velocity of every sample and gradient of every parameter are those of another job."""
        ours, theirs = self.ranks(name), self.ranks(expected)
        for kind in ("velocity", "few", "trained"):
            found = errors(of_samples(ours, kind), of_samples(theirs, kind))
            assert worst(found) < (tolerance,), (kind, worst(found))
        assert worst(errors(whole(ours, "gradient"), whole(theirs, "gradient"))) < (tolerance,)


def of_samples(ranks: Sequence[Rank], kind: str) -> Mapping[str, torch.Tensor]:
    """A tensor of each sample; the ranks that have it must have the same bits."""
    out: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, value in rank.tensors.items():
            if name.startswith(f"{kind}/"):
                assert torch.equal(out.setdefault(name.removeprefix(f"{kind}/"), value), value), name
    assert out
    return out
