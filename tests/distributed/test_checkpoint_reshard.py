# SPDX-License-Identifier: Apache-2.0
"""Invariant: a checkpoint holds one whole model whatever layout wrote it, and every layout loads it.

In two processes, with float32 and 16-bit weights, with and without the distributed optimizer: a layout that resumes its
own checkpoint goes on with the same bits (asserted in the worker); every layout and a single process loads every other
one's, weights and Adam moments bit for bit, and goes on to float32 rounding; an export from any layout has the weights;
a full disk or a damaged file of one rank stops both ranks, the checkpoint before intact.

Does not cover: four processes, sequence parallelism (it cuts no parameter), several nodes.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from omni_engine.checkpoint import load_checkpoint
from omni_engine.parallel import ParallelGroups
from tests.distributed.checkpoint_worker import LAYOUTS, READERS, WRITERS
from tests.helpers import run_torchrun
from tests.single_process import single_process  # noqa: F401 - a fixture
from tests.small_training import build_trainee
from tests.tiny import make_transformer, save_folder

CASES = [(precision, writer) for precision in READERS for writer in WRITERS[precision]]
# Summed in another order; two steps on, and bf16 rounds each weight.
TOLERANCE = {"float32": 1e-5, "bf16": 8e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reshard")
    save_folder(make_transformer(), folder / "model")
    worker = Path(__file__).with_name("checkpoint_worker.py")
    finished = run_torchrun(worker, 2, str(folder), timeout=400)
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-8000:]
    return folder


def assemble(folder: Path, name: str, layout: str) -> dict[str, torch.Tensor]:
    """The whole tensors by `kind/HF name` from the two ranks' dumps."""
    ranks = [load_file(folder / "dumps" / f"{name}.{rank}.safetensors") for rank in range(2)]
    whole = {}
    for key in {**ranks[0], **ranks[1]}:
        kind, dim, source = key.split("/")
        pieces = [rank[key] for rank in ranks if key in rank]
        if LAYOUTS[layout].tp == 2 and dim != "None":
            whole[f"{kind}/{source}"] = torch.cat(pieces, int(dim))
        else:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces), f"ranks of {name} hold different {key}"
            whole[f"{kind}/{source}"] = pieces[0]
    return whole


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """What both have, of which the weights are always a part."""
    common = set(found) & set(expected)
    assert {key for key in expected if key.startswith("weight/")} <= common
    assert not [key for key in common if not torch.equal(found[key], expected[key])]


@pytest.mark.parametrize(("precision", "writer"), CASES)
def test_every_layout_loads_what_another_saved(precision: str, writer: str, folder: Path) -> None:
    saved = assemble(folder, f"{precision}-{writer}-saved", writer)
    for reader in READERS[precision]:
        assert_equal(assemble(folder, f"{precision}-{writer}-{reader}-loaded", reader), saved)


@pytest.mark.parametrize(("precision", "writer"), CASES)
def test_every_layout_goes_on_as_the_writer_did(precision: str, writer: str, folder: Path) -> None:
    """What shows that the moments of the distributed optimizer, which no dump holds, were loaded too."""
    expected = assemble(folder, f"{precision}-{writer}-after", writer)
    before = assemble(folder, f"{precision}-{writer}-saved", writer)
    for reader in READERS[precision]:
        found = assemble(folder, f"{precision}-{writer}-{reader}-after", reader)
        for key, value in expected.items():
            if key.startswith("weight/"):
                error = float((found[key].float() - value.float()).norm() / value.float().norm())
                assert error < TOLERANCE[precision], (reader, key, error)
        assert any(not torch.equal(before[key], expected[key]) for key in before)


@pytest.mark.parametrize(("precision", "writer"), CASES)
def test_a_single_process_loads_and_exports_have_the_weights(
    precision: str,
    writer: str,
    folder: Path,
    single_process: ParallelGroups,  # noqa: F811 - the fixture
) -> None:
    saved = assemble(folder, f"{precision}-{writer}-saved", writer)
    trainee = build_trainee(folder / "model", single_process, bf16=precision == "bf16")
    load_checkpoint(folder / f"{precision}-{writer}", trainee.policy, trainee.optimizer)
    (inner,) = trainee.optimizer.optimizer.chained_optimizers
    found = {}
    for path, parameter in trainee.policy.parameters().items():
        entry = trainee.policy.family.mapping.entries[path]
        state = inner.optimizer.state[getattr(parameter, "main_param", parameter)]
        for kind, tensor in {"weight": parameter.data, "exp_avg": state["exp_avg"]}.items():
            found.update(
                {f"{kind}/{name}": piece for name, piece in zip(entry.sources, entry.split(tensor), strict=True)}
            )
    assert_equal(found, saved)
    exported = load_file(
        folder / "exports" / f"{precision}-{writer}" / "transformer" / "diffusion_pytorch_model.safetensors"
    )
    assert_equal({f"weight/{name}": value for name, value in exported.items()}, saved)


@pytest.mark.parametrize("precision", READERS)
def test_writers_agree_on_what_they_saved(precision: str, folder: Path) -> None:
    """All trained on the same data, so what they saved is one model to rounding: no layout trains another one."""
    first, *others = (assemble(folder, f"{precision}-{writer}-saved", writer) for writer in WRITERS[precision])
    for other, (key, value) in product(others, first.items()):
        if key.startswith("weight/"):
            error = float((other[key].float() - value.float()).norm() / value.float().norm())
            assert error < TOLERANCE[precision], key
