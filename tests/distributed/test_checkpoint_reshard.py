# SPDX-License-Identifier: Apache-2.0
"""Invariant: a checkpoint holds one whole model whatever layout wrote it, and every layout loads it.

In two processes, with float32 and 16-bit weights, with and without the distributed optimizer: a layout that resumes its
own checkpoint goes on with the same bits (asserted in the worker); every layout and a single process loads every other
one's, weights, their average and Adam moments bit for bit, and goes on to float32 rounding; an export from any layout
has the weights; so it is with adapters; a full disk or a damaged file of one rank stops both ranks, the checkpoint
before intact.

Does not cover: four processes, sequence parallelism (it cuts no parameter), several nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from omni_engine.checkpoint import load_checkpoint
from omni_engine.parallel import ParallelGroups
from tests.distributed.checkpoint_worker import FORMS, LAYOUTS, READERS, WRITERS
from tests.helpers import run_torchrun
from tests.single_process import single_process  # noqa: F401 - a fixture
from tests.small_training import build_trainee
from tests.tiny import make_transformer, save_folder

CASES = [(form, writer) for form in READERS for writer in WRITERS[form]]
# Summed in another order; two steps on, and bf16 rounds each weight.
TOLERANCE = {"float32": 1e-5, "bf16": 8e-3, "adapters": 1e-5}
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
FILES = {"adapters": "pytorch_lora_weights.safetensors"}


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
        if LAYOUTS[layout].tensor_model_parallel_size == 2 and dim != "None":
            whole[f"{kind}/{source}"] = torch.cat(pieces, int(dim))
        else:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces), f"ranks of {name} hold different {key}"
            whole[f"{kind}/{source}"] = pieces[0]
    return whole


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the norm; of two that are zero none."""
    difference = float((found.float() - expected.float()).norm())
    return difference / float(expected.float().norm()) if difference else 0.0


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """What both have, of which the weights are always a part."""
    common = set(found) & set(expected)
    assert {key for key in expected if key.startswith("weight/")} <= common
    assert not [key for key in common if not torch.equal(found[key], expected[key])]


@pytest.mark.parametrize(("form", "writer"), CASES)
def test_every_layout_loads_what_another_saved(form: str, writer: str, folder: Path) -> None:
    saved = assemble(folder, f"{form}-{writer}-saved", writer)
    for reader in READERS[form]:
        assert_equal(assemble(folder, f"{form}-{writer}-{reader}-loaded", reader), saved)


@pytest.mark.parametrize(("form", "writer"), CASES)
def test_every_layout_goes_on_as_the_writer_did(form: str, writer: str, folder: Path) -> None:
    """What shows that the moments of the distributed optimizer, which no dump holds, were loaded too."""
    expected = assemble(folder, f"{form}-{writer}-after", writer)
    before = assemble(folder, f"{form}-{writer}-saved", writer)
    for reader in READERS[form]:
        found = assemble(folder, f"{form}-{writer}-{reader}-after", reader)
        for key, value in expected.items():
            if key.startswith("weight/"):
                assert error(found[key], value) < TOLERANCE[form], (reader, key)
        assert any(not torch.equal(before[key], expected[key]) for key in before)


@pytest.mark.parametrize(("form", "writer"), CASES)
def test_a_single_process_loads_and_exports_have_the_weights(
    form: str,
    writer: str,
    folder: Path,
    single_process: ParallelGroups,  # noqa: F811 - the fixture
) -> None:
    saved = assemble(folder, f"{form}-{writer}-saved", writer)
    trainee = build_trainee(folder / "model", single_process, **FORMS[form])
    load_checkpoint(folder / f"{form}-{writer}", trainee.policy, trainee.optimizer)
    (inner,) = trainee.optimizer.optimizer.chained_optimizers
    average = trainee.optimizer.average
    held: dict[str, Mapping[str, torch.Tensor]] = {
        "weight": trainee.weights(),
        "average": {} if average is None else average.weights,
        "exp_avg": {
            path: inner.optimizer.state[getattr(parameter, "main_param", parameter)]["exp_avg"]
            for path, parameter in trainee.policy.trained_parameters().items()
        },
    }
    found = {
        f"{kind}/{name}": piece
        for kind, tensors in held.items()
        for path, entry in trainee.policy.mapping.of(tensors).items()
        for name, piece in zip(entry.sources, entry.split(tensors[path]), strict=True)
    }
    assert_equal(found, saved)
    if form == "adapters":
        saved = {key: value for key, value in saved.items() if ".lora_" in key}
    exported = load_file(folder / "exports" / f"{form}-{writer}" / FILES.get(form, TRANSFORMER))
    assert_equal({f"weight/{name.removeprefix('transformer.')}": value for name, value in exported.items()}, saved)


@pytest.mark.parametrize("writer", WRITERS["adapters"])
def test_a_merged_export_has_the_adapters_in_its_weights(writer: str, folder: Path) -> None:
    saved = assemble(folder, f"adapters-{writer}-saved", writer)
    exported = load_file(folder / "exports" / f"adapters-{writer}-merged" / TRANSFORMER)
    for name, value in exported.items():
        module = f"weight/{name.removesuffix('.weight')}"
        expected = saved[f"weight/{name}"]
        if f"{module}.lora_A.weight" in saved:
            expected = expected + 2.0 * saved[f"{module}.lora_B.weight"] @ saved[f"{module}.lora_A.weight"]
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("form", READERS)
def test_writers_agree_on_what_they_saved(form: str, folder: Path) -> None:
    """All trained on the same data, so what they saved is one model to rounding: no layout trains another one."""
    first, *others = (assemble(folder, f"{form}-{writer}-saved", writer) for writer in WRITERS[form])
    for other, (key, value) in product(others, first.items()):
        if key.startswith("weight/"):
            assert error(other[key], value) < TOLERANCE[form], key
