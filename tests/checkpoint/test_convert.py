# SPDX-License-Identifier: Apache-2.0
"""`tools.checkpoint.convert`: what it writes has the bits of the trained weights, and a checkpoint of another model is
refused. Loading with `DiffusionPipeline.from_pretrained` is covered by the quick start's tests, not here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from omni_engine.checkpoint import save_checkpoint
from omni_engine.parallel import ParallelGroups
from tests.small_training import build_trainee
from tests.tiny import make_transformer, save_folder
from tools.checkpoint.convert import main

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("bf16", [False, True])
def test_the_pipeline_has_the_trained_weights(
    bf16: bool, tmp_path: Path, small_folder: Path, single_process: ParallelGroups, capsys: pytest.CaptureFixture[str]
) -> None:
    trainee = build_trainee(small_folder, single_process, bf16=bf16)
    trainee.train(0)
    save_checkpoint(tmp_path / "run", 1, trainee.policy, trainee.optimizer, {})
    out = tmp_path / "out"
    flags = ["--checkpoint", str(tmp_path / "run"), "--model", str(small_folder), "--out", str(out)]
    assert main(flags) == 0
    assert "iteration 1 of" in capsys.readouterr().out
    dtype = torch.bfloat16 if bf16 else torch.float32
    exported = QwenImageTransformer2DModel.from_pretrained(out / "transformer", torch_dtype=dtype).state_dict()
    weights, mapping = trainee.weights(), trainee.policy.family.mapping
    for path, entry in mapping.entries.items():
        for name, piece in zip(entry.sources, entry.split(weights[path]), strict=True):
            assert exported[name].dtype == piece.dtype == dtype
            assert torch.equal(exported[name], piece), name

    other = save_folder(make_transformer(layers=2), tmp_path / "other")
    flags = ["--checkpoint", str(tmp_path / "run"), "--model", str(other), "--out", str(tmp_path / "out2")]
    assert main(flags) == 1
    assert "is not of the model in" in capsys.readouterr().err
    assert not (tmp_path / "out2").exists()
