# SPDX-License-Identifier: Apache-2.0
"""Writes the README of the model folder: what it is, how it was made, what was measured while making it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-image
---

# qwen_image_tiny

A complete Qwen-Image pipeline (`QwenImagePipeline`: tokenizer, text encoder, transformer, autoencoder, scheduler) of
{million_parameters:.1f} M parameters, so small that reinforcement learning on it runs on two CPU cores. It draws
three digits in 16 x 32 pixel pictures, and was stopped early on purpose: it is the base that the quick start improves
with the reward of a text recogniser.

```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{folder}")
pipeline('the text "482"', height=16, width=32, num_inference_steps=10, true_cfg_scale=1.0).images[0]
```

The prompt is always `the text "..."` with three digits. The model was trained without dropping the prompt, so
classifier-free guidance has no meaning here.

## How it was made

```bash
{command}
```

It took {vae_minutes:.0f} minutes for the autoencoder and {base_minutes:.0f} for the base, with {threads} threads on a
busy machine. Seed and threads determine the weights, on the same kind of machine with the same library versions.

- Corpus: {pictures:,} renders of the {strings} strings of the training split in Pillow's built-in font (Aileron, CC0),
  in grey levels, with random size, position and contrast. The splits are in `{prompts}/digits_*.txt`.
- Autoencoder: `AutoencoderKLQwenImage`, {vae_steps} steps. Loss: L1 + MSE of the pixels and L1 of their differences,
  with noise of {latent_noise} standard deviations on the latents. It was trained on single pictures: its kernels are
  zero where they would see earlier video frames.
- Base: transformer and text encoder trained together by flow matching on the latents, {base_steps} steps of {batch}
  pictures, then their moving average. The text encoder is meant to stay frozen from here on.
- The transformer is stored as float16, all else as float32.

## Measured while making it

The reward is 1 - edits / 3, and 1 when the read text contains the digits; recognisers of the `rapidocr` (PP-OCRv6,
which decided when to stop) and `rapidocr-onnxruntime` (PP-OCRv4) wheels. {prompts_measured} prompts of the validation
split; the held-out split was not looked at. Base: {sampling_steps} deterministic steps.

| mean reward | {names} |
| --- |{rule}
{rows}

Loss of the autoencoder and of the base (single batches), validation reward of the base during training:

| autoencoder step | loss |
| --- | --- |
{vae_rows}

| base step | loss | reward |
| --- | --- | --- |
{base_rows}
"""


def table_rows(rows: list[list[str]]) -> str:
    """Lines of a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def write_model_card(
    folder: Path, log: dict[str, Any], rewards: dict[str, dict[str, float]], facts: dict[str, object]
) -> None:
    """Fill CARD, put it into `folder`. `log`: training_log.json; `rewards`: what was read -> recogniser -> mean."""
    names = list(next(iter(rewards.values())))
    reward_rows = [[what, *(f"{by[name]:.3f}" for name in names)] for what, by in rewards.items()]
    vae_rows = [[f"{row['step']}", f"{row['loss']:.4f}"] for row in log["autoencoder"]]
    base_rows = [[f"{row['step']}", f"{row['loss']:.4f}", f"{row['reward']:.3f}"] for row in log["base"]]
    card = CARD.format(
        folder=folder.as_posix(),
        million_parameters=log["parameters"] / 1e6,
        vae_minutes=log["autoencoder_seconds"] / 60,
        base_minutes=log["base_seconds"] / 60,
        vae_steps=vae_rows[-1][0],
        base_steps=base_rows[-1][0],
        names=" | ".join(names),
        rule=" --- |" * len(names),
        rows=table_rows(reward_rows),
        vae_rows=table_rows(vae_rows),
        base_rows=table_rows(base_rows),
        **facts,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
