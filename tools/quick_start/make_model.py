# SPDX-License-Identifier: Apache-2.0
"""Makes the quick-start model: python -m tools.quick_start.make_model --out assets/qwen_image_tiny --seed 0"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline

from omni_engine.reward import Score
from omni_engine.reward.ocr import Ocr, OcrV4

from .autoencoder import AutoencoderTraining, reconstruct, train_autoencoder
from .model_card import write_model_card
from .render import HEIGHT, WIDTH, prompt_of, render, render_corpus, split_strings
from .tokenizer_and_text_encoder import HIDDEN, build_text_encoder, build_tokenizer, check_template
from .transformer import BaseTraining, build_transformer, train_base

CORPUS_SIZE = 20_000  # pictures
VALIDATION_PROMPTS = 96
SAMPLING_STEPS = 10
RECOGNISERS = {"PP-OCRv6": Ocr, "PP-OCRv4": OcrV4}
STOP_RECOGNISER = "PP-OCRv6"
NOISE_SEED = 5  # of the validation pictures, the same in each evaluation
LOG_FILE = "training_log.json"
log = logging.getLogger(__name__)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--prompts", type=Path, default=Path("assets/prompts"), help="folder of the prompt files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="the weights depend on it in the last digits")
    parser.add_argument("--keep-autoencoder", action="store_true", help="take the autoencoder that is in --out already")
    return parser.parse_args()


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Sigma shifted by 2 at any resolution: the pipeline passes mu, and exp(mu) is the shift."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        time_shift_type="exponential",
        base_shift=math.log(BaseTraining.shift),
        max_shift=math.log(BaseTraining.shift),
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=None,
    )


def write_prompts(folder: Path, split: dict[str, list[str]]) -> None:
    """One file for each part of the split, one prompt a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, strings in split.items():
        text = "".join(prompt_of(string) + "\n" for string in strings)
        (folder / f"digits_{name}.txt").write_text(text, encoding="utf-8")


def generate(pipeline: QwenImagePipeline, strings: list[str]) -> np.ndarray:
    """Sample one picture of each string without guidance. Returns uint8 [N, 16, 32, 3]."""
    pipeline.set_progress_bar_config(disable=True)
    pictures = pipeline(
        prompt=[prompt_of(string) for string in strings],
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=SAMPLING_STEPS,
        true_cfg_scale=1.0,
        generator=torch.Generator().manual_seed(NOISE_SEED),
        output_type="np",
    ).images
    return (pictures * 255).round().astype(np.uint8)


def write_log(out: Path, content: dict[str, object]) -> None:
    """Write `out`/training_log.json."""
    (out / LOG_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_log(out: Path) -> dict[str, Any]:
    """Read `out`/training_log.json."""
    return json.loads((out / LOG_FILE).read_text(encoding="utf-8"))


def assemble(vae: AutoencoderKLQwenImage, seed: int) -> QwenImagePipeline:
    """A pipeline of the trained autoencoder and untrained other parts."""
    tokenizer = build_tokenizer()
    pipeline = QwenImagePipeline(
        scheduler=build_scheduler(),
        vae=vae,
        text_encoder=build_text_encoder(tokenizer, seed),
        tokenizer=tokenizer,
        transformer=build_transformer(HIDDEN, seed),
    )
    check_template(pipeline, prompt_of("482"))
    return pipeline


class Checker:
    """Scores pictures of the validation prompts by each recogniser."""

    def __init__(self, asked: list[str]) -> None:
        self.asked = asked
        self._scorers = {name: scorer() for name, scorer in RECOGNISERS.items()}

    def reward(self, recogniser: str, pictures: np.ndarray) -> float:
        """Mean reward by one recogniser of uint8 pictures [N, 16, 32, 3], one of each asked string."""
        results = self._scorers[recogniser].score(list(pictures), [prompt_of(string) for string in self.asked])
        scores = [result.value for result in results if isinstance(result, Score)]
        if len(scores) < len(results):
            raise RuntimeError(f"{recogniser} could not score {len(results) - len(scores)} pictures")
        return float(np.mean(scores))

    def rewards(self, pictures: np.ndarray) -> dict[str, float]:
        """The same by each recogniser."""
        return {name: self.reward(name, pictures) for name in RECOGNISERS}

    def stop_reward(self, pipeline: QwenImagePipeline) -> float:
        """What decides when the base is good enough."""
        return self.reward(STOP_RECOGNISER, generate(pipeline, self.asked))


def make_autoencoder(out: Path, pictures: np.ndarray, seed: int) -> None:
    """Train the autoencoder; save it into `out`/vae and its losses into `out`/training_log.json."""
    started = time.monotonic()
    vae, history = train_autoencoder(pictures, seed, AutoencoderTraining())
    vae.save_pretrained(out / "vae")
    write_log(out, {"autoencoder": history, "autoencoder_seconds": time.monotonic() - started})


def make_base(out: Path, strings: list[str], pictures: np.ndarray, checker: Checker, seed: int) -> None:
    """Train the base on the autoencoder in `out`; save the whole pipeline there and add to training_log.json."""
    started = time.monotonic()
    pipeline = assemble(AutoencoderKLQwenImage.from_pretrained(out / "vae"), seed)
    pipeline, history = train_base(pipeline, strings, pictures, checker.stop_reward, seed, BaseTraining())
    pipeline.transformer.half()
    pipeline.save_pretrained(out)
    networks = (pipeline.text_encoder, pipeline.transformer, pipeline.vae)
    parameters = sum(parameter.numel() for network in networks for parameter in network.parameters())
    made = {"base": history, "base_seconds": time.monotonic() - started, "parameters": parameters}
    write_log(out, read_log(out) | made)


def measure(out: Path, checker: Checker, renders: np.ndarray) -> dict[str, dict[str, float]]:
    """Rewards of what was saved, on the validation split; fails when the base is too weak or too strong."""
    pipeline = QwenImagePipeline.from_pretrained(out)
    rewards = {
        "clean renders": checker.rewards(np.repeat(renders[..., None], 3, axis=-1)),
        "their reconstructions by the autoencoder": checker.rewards(reconstruct(pipeline.vae, renders)),
        "pictures of the base": checker.rewards(generate(pipeline, checker.asked)),
    }
    low, high = BaseTraining().allowed_reward
    if not low <= rewards["pictures of the base"][STOP_RECOGNISER] <= high:
        raise RuntimeError(f"the base should score between {low} and {high}: {rewards}")
    return rewards


def main() -> None:
    """Render, train the autoencoder, train the base, measure what was saved."""
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(arguments.threads)
    split = split_strings()
    write_prompts(arguments.prompts, split)
    strings, pictures = render_corpus(split["train"], CORPUS_SIZE, arguments.seed)
    checker = Checker(split["validation"][:VALIDATION_PROMPTS])
    if not arguments.keep_autoencoder:
        make_autoencoder(arguments.out, pictures, arguments.seed)
    make_base(arguments.out, strings, pictures, checker, arguments.seed)
    rng = random.Random(arguments.seed + 1)
    rewards = measure(arguments.out, checker, np.stack([render(string, rng) for string in checker.asked]))
    log.info("%s", rewards)
    facts = {
        "command": f"python -m tools.quick_start.make_model --out {arguments.out.as_posix()} --seed {arguments.seed}",
        "threads": arguments.threads,
        "pictures": CORPUS_SIZE,
        "strings": len(split["train"]),
        "prompts": arguments.prompts.as_posix(),
        "prompts_measured": VALIDATION_PROMPTS,
        "sampling_steps": SAMPLING_STEPS,
        "latent_noise": AutoencoderTraining().latent_noise,
        "batch": BaseTraining().batch,
    }
    write_model_card(arguments.out, read_log(arguments.out), rewards, facts)


if __name__ == "__main__":
    main()
