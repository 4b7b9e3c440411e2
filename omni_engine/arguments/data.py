# SPDX-License-Identifier: Apache-2.0
"""Settings of the prompts."""

from __future__ import annotations

from dataclasses import dataclass

from omni_engine.arguments.flag import flag


@dataclass(frozen=True)
class DataSettings:
    """Data: the prompt files of training and evaluation."""

    train_prompts: str = flag(help="UTF-8 text file with one training prompt a line.")
    eval_prompts: str | None = flag(
        None, help="UTF-8 text file with one held-out prompt a line. Not given: no evaluation is run."
    )
    eval_num_prompts: int = flag(
        96, unit="prompts", at_least=1, help="Prompts of an evaluation: the first of the file."
    )
    eval_num_inference_steps: int = flag(
        10, unit="steps", at_least=1, help="Denoising steps of an evaluation sample. They are plain ODE steps."
    )
    eval_seed: int = flag(
        5, at_least=0, below=2**63, help="Seed of the initial latents of an evaluation: the same ones every time."
    )
