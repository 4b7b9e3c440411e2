# SPDX-License-Identifier: Apache-2.0
"""Invariant: the first iterations of the quick start, as shipped, raise the reward of validation prompts that are not
trained on; rollout and trainer agree exactly on the way; the run leaves what its README promises; and the exported
pipeline is the trained policy, which diffusers samples as the engine does.

The margin is half of the smallest rise measured, in one process: from 0.406 by 0.153, 0.139 and 0.149 with the seeds
1234, 1 and 2; in two processes, as the script starts it on two cores, by 0.153 with the shipped seed 1234. With the
advantages dealt out at random it fell by 0.097.

Does not cover: the rest of the quick start, how far it gets, other seeds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import omni_engine  # noqa: F401 - prepares megatron.core's import
from omni_engine.arguments import ModelSettings, ParallelSettings
from omni_engine.checkpoint import SavedWeights, load_transformer
from omni_engine.flow import INITIAL_LATENT, philox_normal
from omni_engine.models import build_family
from omni_engine.models.guidance import Guidance
from omni_engine.models.policy import Policy
from omni_engine.parallel import ParallelGroups
from omni_engine.rollout import NativeRollout, PromptEncoder, RolloutRequest
from tests.runs import MODEL, VALIDATION_PROMPTS, metrics, succeeded

pytestmark = pytest.mark.timeout(3600)

ITERATIONS = 12
MARGIN = 0.07
HEIGHT, WIDTH, STEPS, SEED = 16, 32, 10, 5


@dataclass(frozen=True)
class Trained:
    """What a short run of the quick start has left."""

    run: Path
    exported: Path
    output: str

    @property
    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return content


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("quick_start")
    output = succeeded(
        [
            *("--train-iters", str(ITERATIONS), "--eval-interval", str(ITERATIONS)),
            *("--lr-decay-iters", "100"),  # the learning rates of the whole quick start
            *("--eval-prompts", str(VALIDATION_PROMPTS)),
            *("--runs-dir", str(folder), "--export-hf", str(folder / "exported")),
        ],
        processes=None,
    )
    return Trained(folder / "quick_start", folder / "exported", output)


def test_the_reward_of_validation_prompts_rises(trained: Trained) -> None:
    before, after = trained.summary["held_out_reward_before"], trained.summary["held_out_reward_after"]
    print(f"validation reward {before:.4f} -> {after:.4f}")
    assert after - before > MARGIN


def test_rollout_and_trainer_agree_exactly(trained: Trained) -> None:
    summary = trained.summary
    assert summary["log_prob_gap_max"] == 0.0
    assert summary["first_ratio_max_deviation"] == 0.0
    iterations = [line for line in metrics(trained.run) if "parity/log_prob_gap_max" in line]
    assert [line["iteration"] for line in iterations] == list(range(1, ITERATIONS + 1))
    assert all(line["policy/last_ratio_max_deviation"] > 0 for line in iterations)  # or the agreement would be empty


def test_the_summary_says_what_came_of_the_run(trained: Trained) -> None:
    summary = trained.summary
    assert (summary["iterations"], summary["seed"], summary["images"]) == (ITERATIONS, 1234, ITERATIONS * 192)
    assert summary["seconds_total"] > 0 and summary["images_per_second"] > 0
    assert set(summary["layout"]) >= {"tp", "pp", "dp"}
    assert f"Finished: {ITERATIONS} iterations" in trained.output
    assert "Rollout and trainer agreed exactly on every log-prob." in trained.output


def test_pictures_and_curve_are_there(trained: Trained) -> None:
    pictures = ["before.png", "after.png", "curve.png", f"samples/iter_{ITERATIONS:07d}.png"]
    for name in pictures:
        with Image.open(trained.run / name) as picture:
            assert len(picture.convert("RGB").getcolors(2**24) or ()) > 1, f"{name} is blank"
    assert (trained.run / "before.png").read_bytes() != (trained.run / "after.png").read_bytes()


def test_the_exported_weights_are_those_of_the_last_checkpoint(trained: Trained) -> None:
    exported = load_file(trained.exported / "transformer" / "diffusion_pytorch_model.safetensors")
    shipped = load_file(MODEL / "transformer" / "diffusion_pytorch_model.safetensors")
    saved = SavedWeights(trained.run / "checkpoints")
    assert saved.iteration == ITERATIONS
    weights = dict(saved)
    assert set(exported) == set(weights) == set(shipped)
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
    assert any(not torch.equal(exported[name], weight) for name, weight in shipped.items())


def test_diffusers_draws_the_picture_that_the_engine_draws(trained: Trained, single_process: ParallelGroups) -> None:
    """From the same initial latents, within 1 of 255 for the rounding to bytes. 0 was measured; with 9 or 11 steps for
    10 the pictures are 3 to 7 apart."""
    from diffusers import DiffusionPipeline

    prompts = VALIDATION_PROMPTS.read_text().splitlines()[:3]
    ours = engine_pictures(trained.exported, prompts, single_process)
    pipeline = DiffusionPipeline.from_pretrained(trained.exported)
    pipeline.set_progress_bar_config(disable=True)
    for number, prompt in enumerate(prompts):
        channels = pipeline.transformer.config.in_channels
        tokens = (HEIGHT // pipeline.vae_scale_factor // 2) * (WIDTH // pipeline.vae_scale_factor // 2)
        noise = philox_normal(SEED, torch.tensor([number]), 0, INITIAL_LATENT, tokens * channels)
        theirs = pipeline(
            prompt,
            height=HEIGHT,
            width=WIDTH,
            num_inference_steps=STEPS,
            true_cfg_scale=1.0,
            latents=noise.view(1, tokens, channels),
        ).images[0]
        difference = np.abs(ours[number].astype(int) - np.asarray(theirs).astype(int))
        assert difference.max() <= 1
    assert np.abs(ours[0].astype(int) - ours[1].astype(int)).max() > 100  # the prompts show


def engine_pictures(folder: Path, prompts: list[str], groups: ParallelGroups) -> np.ndarray:
    """uint8 [B, HEIGHT, WIDTH, 3] by plain ODE steps, sample i from the noise of id i."""
    family = build_family("qwen_image", folder)
    policy = Policy(family, groups, ModelSettings(str(folder), height=HEIGHT, width=WIDTH), ParallelSettings())
    load_transformer(policy.parameters(), family.mapping, folder / "transformer", groups)
    components = family.load_components(1024)
    rollout = NativeRollout(policy, PromptEncoder(components, groups, " "), components, HEIGHT, WIDTH)
    ids = torch.arange(len(prompts))
    request = RolloutRequest(
        ids=ids,
        groups=ids,
        prompts=prompts,
        prompt_of=ids,
        seed=SEED,
        schedule=family.schedule(STEPS, HEIGHT, WIDTH),
        sde_type="sde",
        noise_level=1.0,
        window=(),
        guidance=Guidance(1.0, "both"),
        micro_batch_size=2,
    )
    pictures = [chunk.images for chunk in rollout.generate(request)]
    return np.concatenate([part for part in pictures if part is not None])
