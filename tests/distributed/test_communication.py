# SPDX-License-Identifier: Apache-2.0
"""Invariant: what a rank exchanges in a forward pass, a training pass, an optimizer step and a rollout is what
`models/communication.py` says, under every layout: for each kind of call and each set of ranks the same number of calls
and the same bytes. Exact: both are counts.

Counted where torch.distributed hands a call to its backends, whoever makes it. Axes that are the same ranks in a layout
are compared together; layouts of four processes tell them apart.

Not covered: adapters, the exchange of objects (prompts, metrics), rewards, checkpoints, devices other than the CPU,
buckets of other Megatron versions than the installed one.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import run_torchrun

pytestmark = pytest.mark.timeout(1800)
LAYERS = 4
LAUNCHES = {
    2: [
        *("TP2", "TP2-SP", "TP2-SP-full", "TP2-selective-bf16", "U2", "U2-full", "R2", "R2-bf16"),
        *("PP2", "PP2-uneven", "PP2xVPP2", "DP2", "DP2-DO", "DP2-DO-bf16", "DP2-overlap", "DP2-DO-overlap"),
    ],
    4: [
        *("U2xR2", "TP2xU2", "TP2xU2-SP", "TP2xR2-SP-full-bf16", "TP2xPP2-SP", "PP2xVPP2xR2", "PP4"),
        *("DP2xU2-DO", "DP2xTP2-SP-DO", "DP2xPP2xVPP2-DO-overlap"),
    ],
}
Tables = dict[str, dict[str, dict[str, list[int]]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tools.bench.tiny_engine import make_folder

    return make_folder(tmp_path_factory.mktemp("communication"), LAYERS)


@cache
def launch(folder: Path, processes: int) -> None:
    worker = "tests.distributed.communication_worker"
    result = run_torchrun(worker, processes, str(folder), *LAUNCHES[processes], timeout=900)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


@pytest.mark.parametrize(("processes", "case"), [(n, case) for n, cases in LAUNCHES.items() for case in cases])
def test_every_exchange_is_counted_and_predicted_alike(folder: Path, processes: int, case: str) -> None:
    launch(folder, processes)
    for rank in range(processes):
        tables: Tables = json.loads((folder / f"{case}.{rank}.json").read_text())
        assert any(table["counted"] for table in tables.values())
        for phase, table in tables.items():
            assert table["counted"] == table["predicted"], f"{case}, rank {rank}, {phase}"
