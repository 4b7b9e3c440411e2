# SPDX-License-Identifier: Apache-2.0
"""Trains the base: transformer and text encoder together, by flow matching, until the digits are weakly readable."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from torch import nn

from .autoencoder import encode_normalised
from .render import HEIGHT, WIDTH, prompt_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseTraining:
    """How the base is trained and when it is good enough: readable sometimes, with room for reinforcement learning."""

    batch: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    shift: float = 2.0  # of sigma, the same as the scheduler's
    stop_reward: float = 0.34  # training ends at the first evaluation of the averaged weights at or above this
    allowed_reward: tuple[float, float] = (0.30, 0.42)
    evaluate_every: int = 50  # steps
    max_steps: int = 2000


def build_transformer(text_width: int, seed: int) -> QwenImageTransformer2DModel:
    """2.5 M parameters; 8 picture tokens of 64 and the text tokens of width `text_width`."""
    torch.manual_seed(seed)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=text_width,
        axes_dims_rope=(8, 12, 12),
    )
    nn.init.zeros_(transformer.proj_out.weight)
    nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[N, C, 1, h, w] latents -> [N, h/2 * w/2, 4 C] tokens, as the pipeline does."""
    count, channels, _, height, width = latents.shape
    return QwenImagePipeline._pack_latents(latents, count, channels, height, width)


def draw_sigmas(count: int, shift: float, generator: torch.Generator) -> torch.Tensor:
    """[count] noise levels in (0, 1): logit-normal, then shifted towards noise."""
    sigma = torch.sigmoid(torch.randn(count, generator=generator))
    return shift * sigma / (1 + (shift - 1) * sigma)


def flow_matching_loss(
    pipeline: QwenImagePipeline, prompts: list[str], clean: torch.Tensor, shift: float, generator: torch.Generator
) -> torch.Tensor:
    """Mean squared error of the velocity (noise - clean) at a random sigma. `clean`: tokens [N, 8, 64]."""
    embeddings, mask = pipeline.encode_prompt(prompts)
    sigma = draw_sigmas(len(clean), shift, generator)
    noise = torch.randn(clean.shape, generator=generator)
    level = sigma.view(-1, 1, 1)
    grid = (1, HEIGHT // (2 * pipeline.vae_scale_factor), WIDTH // (2 * pipeline.vae_scale_factor))
    velocity = pipeline.transformer(
        hidden_states=(1 - level) * clean + level * noise,
        timestep=sigma,
        encoder_hidden_states=embeddings,
        encoder_hidden_states_mask=mask,
        img_shapes=[[grid]] * len(clean),
        return_dict=False,
    )[0]
    return (velocity - (noise - clean)).square().mean()


@torch.no_grad()
def update_average(average: Iterable[nn.Parameter], current: Iterable[nn.Parameter], step: int) -> None:
    """Exponential moving average, short at first: decay (1 + step) / (10 + step), at most 0.998."""
    decay = min(0.998, (1 + step) / (10 + step))
    for kept, new in zip(average, current, strict=True):
        kept.lerp_(new, 1 - decay)


def train_base(
    pipeline: QwenImagePipeline,
    strings: list[str],
    pictures: np.ndarray,
    reward_of: Callable[[QwenImagePipeline], float],
    seed: int,
    training: BaseTraining,
) -> tuple[QwenImagePipeline, list[dict[str, float]]]:
    """Train `pipeline`'s transformer and text encoder on uint8 `pictures` [N, 16, 32] of `strings`.

    Returns a pipeline with the averaged weights, and the log: step, loss, reward by `reward_of`.
    """
    tokens = pack(encode_normalised(pipeline.vae, pictures))
    prompts = [prompt_of(string) for string in strings]
    averaged = QwenImagePipeline(
        scheduler=pipeline.scheduler,
        vae=pipeline.vae,
        tokenizer=pipeline.tokenizer,
        text_encoder=copy.deepcopy(pipeline.text_encoder),
        transformer=copy.deepcopy(pipeline.transformer),
    )
    current, average = _trained_parameters(pipeline), _trained_parameters(averaged)
    optimizer = torch.optim.AdamW(current, lr=training.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / training.warmup_steps))
    generator = torch.Generator().manual_seed(seed)
    history = []
    for step in range(1, training.max_steps + 1):
        picked = torch.randint(len(tokens), (training.batch,), generator=generator)
        loss = flow_matching_loss(
            pipeline, [prompts[i] for i in picked.tolist()], tokens[picked], training.shift, generator
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(current, 1.0)
        optimizer.step()
        schedule.step()
        update_average(average, current, step)
        if step % training.evaluate_every == 0:
            reward = reward_of(averaged)
            history.append({"step": step, "loss": loss.item(), "reward": reward})
            log.info("base step %d loss %.4f reward %.3f", step, loss.item(), reward)
            if reward >= training.stop_reward:
                return averaged, history
    raise RuntimeError(f"after {training.max_steps} steps the reward is below {training.stop_reward}: {history[-1]}")


def _trained_parameters(pipeline: QwenImagePipeline) -> list[nn.Parameter]:
    return [*pipeline.transformer.parameters(), *pipeline.text_encoder.parameters()]
