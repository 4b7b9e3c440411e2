# SPDX-License-Identifier: Apache-2.0
"""Invariant: a transformer folder comes in, and goes out again, with the bits of every tensor; a folder that is damaged
or of another model is refused by name.

Covers one process; export from several is in tests/distributed/test_checkpoint_reshard.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file

from omni_engine.arguments import ModelSettings, ParallelSettings
from omni_engine.checkpoint import CheckpointError, export_pipeline, hf_export, load_transformer
from omni_engine.checkpoint.huggingface import INDEX_FILE, SINGLE_FILE, SafetensorsFolder
from omni_engine.models import build_family
from omni_engine.models.policy import Policy
from omni_engine.parallel import ParallelGroups
from tests.full_disk import full_disk
from tests.tiny import make_transformer, save_folder

pytestmark = pytest.mark.fast
NAME = "transformer_blocks.1.attn.to_k.weight"


def policy_of(folder: Path, groups: ParallelGroups, bf16: bool = False) -> Policy:
    """A policy for the folder's model, without weights."""
    family = build_family("qwen_image", folder)
    return Policy(family, groups, ModelSettings(model=str(folder), height=16, width=16, bf16=bf16), ParallelSettings())


def load(policy: Policy, folder: Path) -> None:
    load_transformer(policy.parameters(), policy.family.mapping, folder / "transformer", policy.groups)


def export(policy: Policy, source: Path, target: Path) -> None:
    export_pipeline(policy.parameters(), policy.family.mapping, source, target, policy.groups)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that a test may change."""
    source = save_folder(make_transformer(layers=2), tmp_path / "model")
    (source / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    (source / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"the autoencoder")
    return source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
def test_in_and_out_keep_every_bit(
    dtype: torch.dtype, shard_size: str, tmp_path: Path, single_process: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16-bit files in a float32 policy too: a float32 holds every float16 and bfloat16."""
    model = make_transformer().to(dtype)
    source = save_folder(make_transformer(layers=1), tmp_path / "model")
    for file in (source / "transformer").glob("*"):
        file.unlink()
    model.save_pretrained(source / "transformer", max_shard_size=shard_size)
    assert (source / "transformer" / INDEX_FILE).exists() == (shard_size != "1GB")
    monkeypatch.setattr(hf_export, "SHARD_BYTES", 200_000 if shard_size != "1GB" else 2**30)

    bf16 = dtype == torch.bfloat16
    policy = policy_of(source, single_process, bf16)
    load(policy, source)
    export(policy, source, tmp_path / "out")
    held = torch.bfloat16 if bf16 else torch.float32
    files = (tmp_path / "out" / "transformer").glob("*.safetensors")
    written = {name: value for file in files for name, value in load_file(file).items()}
    exported = QwenImageTransformer2DModel.from_pretrained(tmp_path / "out" / "transformer", torch_dtype=held)
    for name, value in model.state_dict().items():
        assert written[name].dtype == held
        assert torch.equal(written[name], value.to(held)), name
        assert torch.equal(exported.state_dict()[name], value.to(held)), name
    assert (tmp_path / "out" / "transformer" / INDEX_FILE).exists() == (shard_size != "1GB")

    again = policy_of(source, single_process, bf16)
    load(again, tmp_path / "out")
    for (name, ours), theirs in zip(again.stage.named_parameters(), policy.parameters().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_export_copies_the_other_components(folder: Path, tmp_path: Path, single_process: ParallelGroups) -> None:
    (folder / "README.md").write_text("the card of the other model")
    policy = policy_of(folder, single_process)
    load(policy, folder)
    for _ in range(2):  # an earlier export is replaced
        export(policy, folder, tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    expected = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == expected - {"README.md"}
    assert (tmp_path / "out" / "vae" / "diffusion_pytorch_model.safetensors").read_bytes() == b"the autoencoder"
    assert not list(tmp_path.glob(".*"))


def test_export_overwrites_neither_its_source_nor_a_folder_of_something_else(
    folder: Path, tmp_path: Path, single_process: ParallelGroups
) -> None:
    policy = policy_of(folder, single_process)
    load(policy, folder)
    before = sorted(folder.rglob("*"))
    for target in (folder, folder / "out", tmp_path):
        with pytest.raises(CheckpointError, match="would overwrite"):
            export(policy, folder, target)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"cat")
    with pytest.raises(CheckpointError, match="no exported pipeline"):
        export(policy, folder, tmp_path / "photos")
    assert sorted(folder.rglob("*")) == before
    assert (tmp_path / "photos" / "cat.png").exists()


def test_export_that_cannot_be_written_leaves_what_was_there(
    folder: Path, tmp_path: Path, single_process: ParallelGroups
) -> None:
    policy = policy_of(folder, single_process)
    load(policy, folder)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be written"):
        export(policy, folder, tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model"]
    (tmp_path / "file").unlink()
    export(policy, folder, tmp_path / "out")
    for limit in (0, 20_000):
        with pytest.raises(CheckpointError, match="cannot be written"), full_disk(limit):
            export(policy, folder, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
        load(policy, tmp_path / "out")


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change tensors of the transformer (None takes one out); a name's dots are written as `__`."""
    file = folder / "transformer" / SINGLE_FILE
    tensors = load_file(file)
    for key, value in changes.items():
        tensors.pop(key.replace("__", "."), None)
        if value is not None:
            tensors[key.replace("__", ".")] = value
    save_file(tensors, file)


KEY = NAME.replace(".", "__")
BROKEN = {
    "missing tensor": (lambda folder: rewrite(folder, **{KEY: None}), f"missing {NAME}; unexpected nothing"),
    "unexpected tensor": (lambda folder: rewrite(folder, lora=torch.ones(1)), "missing nothing; unexpected lora"),
    "other shape": (lambda folder: rewrite(folder, **{KEY: torch.ones(64, 32)}), r"\(64, 32\).*expects \(64, 64\)"),
    "not a number": (lambda folder: rewrite(folder, **{KEY: torch.full((64, 64), torch.nan)}), "not finite"),
    "no file": (lambda folder: (folder / "transformer" / SINGLE_FILE).unlink(), "does not exist"),
    "truncated file": (lambda folder: truncate(folder / "transformer" / SINGLE_FILE), "may be truncated"),
    "a pickle": (lambda folder: torch.save({NAME: 1}, folder / "transformer" / SINGLE_FILE), "cannot be read"),
    "damaged index": (lambda folder: (folder / "transformer" / INDEX_FILE).write_text("{"), "cannot be read"),
    "index of other tensors": (lambda folder: index(folder, {NAME: SINGLE_FILE}), "disagree about"),
    "index that leads elsewhere": (lambda folder: index(folder, {NAME: "../../x"}), "does not lie beside it"),
}


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "transformer" / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("fault", BROKEN)
def test_a_damaged_folder_is_refused(fault: str, folder: Path, single_process: ParallelGroups) -> None:
    damage, message = BROKEN[fault]
    policy = policy_of(folder, single_process)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load(policy, folder)


def test_a_model_that_does_not_divide_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="do not divide over --tensor-model-parallel-size 3"):
        SafetensorsFolder(folder / "transformer").read(NAME, 0, 0, 3)
