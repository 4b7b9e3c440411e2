# SPDX-License-Identifier: Apache-2.0
"""Invariant: what a run with adapters exports is, in diffusers, the policy that it trained. The file of adapters is
what `QwenImagePipeline.load_lora_weights` reads, with the scale that they were trained with; the merged pipeline needs
no adapters; and `tools.checkpoint.convert` writes the bits of both, and of the average, from a checkpoint.

Tolerance 1e-5 of the velocity's norm: the networks add in another order (1e-6 was measured).

Where peft, which load_lora_weights needs, is not installed, that one test is skipped: the file's form and the merged
weights are checked then. Export from several processes is in test_checkpoint_reshard.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file

from omni_engine.arguments import LoraSettings
from omni_engine.checkpoint import CheckpointError, export_policy, model_fingerprint, save_checkpoint
from omni_engine.models import DenoiserInput, TextCondition
from omni_engine.parallel import ParallelGroups
from tests.small_training import Trainee, build_trainee
from tools.checkpoint.convert import main as convert

TOLERANCE = 1e-5
LORA = LoraSettings(lora_rank=3, lora_alpha=4.5)
FILE = "pytorch_lora_weights.safetensors"
WEIGHTS = Path("transformer") / "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def trainee(small_folder: Path, single_process: ParallelGroups) -> Trainee:
    """Adapters that have moved a good way, and their average."""
    trainee = build_trainee(small_folder, single_process, lora=LORA, ema_decay=0.9)
    torch.manual_seed(3)
    with torch.no_grad():
        for path, parameter in trainee.policy.adapters().items():
            if path.endswith("up"):
                parameter.normal_(std=0.1)
    trainee.train(0, 1)
    return trainee


def velocity(trainee: Trainee, inputs: DenoiserInput) -> torch.Tensor:
    with torch.no_grad():
        return trainee.policy.stage(inputs)


def inputs_of(trainee: Trainee) -> DenoiserInput:
    shape, generator = trainee.policy.shape, torch.Generator().manual_seed(4)
    latents = torch.randn(2, shape.tokens, shape.channels, generator=generator)
    text = TextCondition(torch.randn(2, 5, 24, generator=generator), (5, 5))
    return DenoiserInput({"image": latents}, torch.tensor([0.3, 0.8]), text, shape.grid)


def theirs(model: QwenImageTransformer2DModel, inputs: DenoiserInput) -> torch.Tensor:
    with torch.no_grad():
        shapes = [[inputs.grid]] * 2
        out: torch.Tensor = model(
            inputs.latents["image"], inputs.text.embeddings, None, inputs.time, shapes, return_dict=False
        )[0]
    return out


def distance(ours: torch.Tensor, others: torch.Tensor) -> float:
    return float((ours - others).norm() / others.norm())


def export(trainee: Trainee, source: Path, target: Path, merge: bool = False) -> Path:
    export_policy(trainee.policy, source, target, merge)
    return target


@pytest.mark.fast
def test_the_file_has_the_form_that_diffusers_writes(trainee: Trainee, small_folder: Path, tmp_path: Path) -> None:
    target = export(trainee, small_folder, tmp_path / "out")
    assert [path.name for path in target.iterdir()] == [FILE]
    with safe_open(target / FILE, "pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
        assert file.metadata()["format"] == "pt"
        names = set(file.keys())
    entries = trainee.policy.mapping.of(trainee.policy.adapters()).values()
    assert names == {f"transformer.{name}" for entry in entries for name in entry.sources}
    assert (metadata["transformer.r"], metadata["transformer.lora_alpha"]) == (3, 4.5)
    modules = {name.removeprefix("transformer.").rsplit(".lora_", 1)[0] for name in names}
    assert set(metadata["transformer.target_modules"]) == modules
    saved = load_file(target / FILE)
    adapter = trainee.policy.adapters()["blocks.0.image.qkv.adapter.up"].detach()
    for name, piece in zip(("to_q", "to_k", "to_v"), adapter.chunk(3), strict=True):
        assert torch.equal(saved[f"transformer.transformer_blocks.0.attn.{name}.lora_B.weight"], piece)


@pytest.mark.fast
def test_diffusers_loads_the_adapters_and_is_the_policy(trainee: Trainee, small_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    target, inputs = export(trainee, small_folder, tmp_path / "out"), inputs_of(trainee)
    model = QwenImageTransformer2DModel.from_pretrained(small_folder / "transformer")
    base = theirs(model, inputs)
    pipeline = QwenImagePipeline(scheduler=None, vae=None, text_encoder=None, tokenizer=None, transformer=model)
    pipeline.load_lora_weights(target)
    ours = velocity(trainee, inputs)
    assert distance(theirs(pipeline.transformer, inputs), ours) < TOLERANCE
    assert distance(base, ours) > 0.05


@pytest.mark.fast
def test_the_merged_pipeline_is_the_policy(trainee: Trainee, small_folder: Path, tmp_path: Path) -> None:
    target, inputs = export(trainee, small_folder, tmp_path / "out", merge=True), inputs_of(trainee)
    model = QwenImageTransformer2DModel.from_pretrained(target / "transformer")
    assert distance(theirs(model, inputs), velocity(trainee, inputs)) < TOLERANCE
    assert (target / "scheduler" / "scheduler_config.json").exists()


@pytest.mark.parametrize("average", [False, True])
def test_a_checkpoint_converts_to_the_bits_of_the_exports(
    average: bool, trainee: Trainee, small_folder: Path, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "run", 2, trainee.policy, trainee.optimizer, {})
    kept = trainee.optimizer.average
    assert kept is not None

    def converted(name: str, *flags: str) -> Path:
        arguments = ["--checkpoint", str(tmp_path / "run"), "--model", str(small_folder), "--out", str(tmp_path / name)]
        assert convert([*arguments, *flags, *(["--weights", "ema"] if average else [])]) == 0
        return tmp_path / name

    def exported(name: str, merge: bool) -> Path:
        if not average:
            return export(trainee, small_folder, tmp_path / name, merge)
        with kept.in_place():
            return export(trainee, small_folder, tmp_path / name, merge)

    adapters = load_file(exported("ours", merge=False) / FILE), load_file(converted("theirs") / FILE)
    merged = [exported("our pipeline", merge=True), converted("their pipeline", "--merge")]
    whole = load_file(merged[0] / WEIGHTS), load_file(merged[1] / WEIGHTS)
    for ours, others in (adapters, whole):
        assert set(ours) == set(others)
        assert all(torch.equal(value, others[name]) for name, value in ours.items())


def test_adapters_are_not_merged_into_another_model(
    trainee: Trainee, small_folder: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"model_sha256": model_fingerprint(small_folder)}
    save_checkpoint(tmp_path / "run", 2, trainee.policy, trainee.optimizer, state)
    for number, (model, status) in enumerate(((small_folder, 0), (model_folder, 1))):
        out = tmp_path / str(number)
        flags = ["--checkpoint", str(tmp_path / "run"), "--model", str(model), "--out", str(out), "--merge"]
        assert convert(flags) == status
        assert out.exists() == (status == 0)
    assert "were trained on another model" in capsys.readouterr().err


@pytest.mark.fast
def test_adapters_replace_their_like_and_nothing_else(trainee: Trainee, small_folder: Path, tmp_path: Path) -> None:
    for _ in range(2):
        export(trainee, small_folder, tmp_path / "out")
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is no folder of adapters"):
        export(trainee, small_folder, tmp_path / "pipeline")
    with pytest.raises(CheckpointError, match="is no exported pipeline"):
        export(trainee, small_folder, tmp_path / "out", merge=True)


@pytest.mark.parametrize(
    ("lora", "flags", "message"),
    [
        (None, ["--merge"], "holds all weights and no adapters"),
        (None, ["--weights", "ema"], "holds no average of the weights"),
        (LORA, [], None),
    ],
)
def test_what_a_checkpoint_does_not_hold_is_refused(
    lora: LoraSettings | None,
    flags: Sequence[str],
    message: str | None,
    small_folder: Path,
    tmp_path: Path,
    single_process: ParallelGroups,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainee = build_trainee(small_folder, single_process, lora=lora)
    save_checkpoint(tmp_path / "run", 1, trainee.policy, trainee.optimizer, {})
    arguments = ["--checkpoint", str(tmp_path / "run"), "--model", str(small_folder), "--out", str(tmp_path / "out")]
    assert convert([*arguments, *flags]) == (0 if message is None else 1)
    assert message is None or message in capsys.readouterr().err
