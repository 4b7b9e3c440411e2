# SPDX-License-Identifier: Apache-2.0
"""Trains the autoencoder: AutoencoderKLQwenImage of 0.6 M parameters on 16 x 32 pixel renders, 8 tokens a picture."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    QwenImageAttentionBlock,
    QwenImageResidualBlock,
)
from torch import nn
from torch.nn import functional

from .single_frame_layers import single_frame_layers

LATENT_CHANNELS = 16
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AutoencoderTraining:
    """How the autoencoder is trained."""

    steps: int = 1200
    batch: int = 32
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    final_share: float = 0.02  # of the learning rate, reached along a cosine
    latent_noise: float = 0.1  # standard deviation, in units of the latents' own; keeps the decoder smooth
    gradient_weight: float = 0.5  # of the loss on differences of neighbouring pixels, which carry the strokes
    measured_pictures: int = 1024  # for the latents' mean and standard deviation
    log_every: int = 50  # steps


def build_autoencoder() -> AutoencoderKLQwenImage:
    """Two halvings of the picture: [B, 3, 1, 16, 32] pixels <-> [B, 16, 1, 4, 8] latents."""
    vae = AutoencoderKLQwenImage(
        base_dim=16,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, False],
        input_channels=3,
    )
    initialise_for_single_frames(vae)
    return vae


@torch.no_grad()
def initialise_for_single_frames(vae: AutoencoderKLQwenImage) -> None:
    """Random kernels that keep the size of a single frame's activations; residual branches start at zero.

    torch's own start counts the time slices that single frames never meet, and is three times too small here at each
    layer; training then stays for hundreds of steps at blurred pictures. Those slices are zero from here on.
    """
    for module in vae.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            fan_in = module.in_channels * module.kernel_size[-1] * module.kernel_size[-2]
            nn.init.normal_(module.weight, std=fan_in**-0.5)
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Conv3d):
            module.weight[:, :, :-1] = 0
    for module in vae.modules():
        if isinstance(module, QwenImageResidualBlock):
            nn.init.zeros_(module.conv2.weight)
        if isinstance(module, QwenImageAttentionBlock):
            nn.init.zeros_(module.proj.weight)


def as_pixels(pictures: np.ndarray) -> torch.Tensor:
    """uint8 grey [N, H, W] -> float32 [N, 3, 1, H, W] in [-1, 1]."""
    grey = torch.from_numpy(pictures).float()[:, None] / 127.5 - 1
    return grey.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last).unsqueeze(2)


def as_pictures(pixels: torch.Tensor) -> np.ndarray:
    """float [N, 3, 1, H, W] in [-1, 1] -> uint8 [N, H, W, 3]."""
    return ((pixels[:, :, 0].clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()


def _encode(vae: AutoencoderKLQwenImage, pixels: torch.Tensor) -> torch.Tensor:
    return vae.quant_conv(vae.encoder(pixels))[:, :LATENT_CHANNELS]


def _decode(vae: AutoencoderKLQwenImage, latents: torch.Tensor) -> torch.Tensor:
    return vae.decoder(vae.post_quant_conv(latents))


def reconstruction_loss(output: torch.Tensor, target: torch.Tensor, gradient_weight: float) -> torch.Tensor:
    """L1 + MSE of the pixels, plus L1 of the horizontal and vertical differences."""
    loss = functional.l1_loss(output, target) + functional.mse_loss(output, target)
    for axis in (-1, -2):
        loss = loss + gradient_weight * functional.l1_loss(output.diff(dim=axis), target.diff(dim=axis))
    return loss


def learning_rate_factor(step: int, steps: int, warmup_steps: int, final_share: float) -> float:
    """Linear warm-up, then a cosine down to `final_share`. `step` counts from 0."""
    warmup = min(1.0, (step + 1) / warmup_steps)
    cosine = 0.5 * (1 + np.cos(np.pi * step / steps))
    return warmup * (final_share + (1 - final_share) * cosine)


def train_autoencoder(
    pictures: np.ndarray, seed: int, training: AutoencoderTraining
) -> tuple[AutoencoderKLQwenImage, list[dict[str, float]]]:
    """Train on uint8 grey pictures [N, 16, 32]. Returns the autoencoder, finished, and the log: step, loss."""
    torch.manual_seed(seed)
    vae = build_autoencoder()
    pixels = as_pixels(pictures)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=training.learning_rate, betas=(0.9, 0.99), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: learning_rate_factor(step, training.steps, training.warmup_steps, training.final_share),
    )
    history = []
    with single_frame_layers():
        for step in range(1, training.steps + 1):
            batch = pixels[torch.randint(len(pixels), (training.batch,), generator=generator)]
            latents = _encode(vae, batch)
            noise = torch.randn(latents.shape, generator=generator) * latents.detach().std()
            output = _decode(vae, latents + training.latent_noise * noise)
            loss = reconstruction_loss(output, batch, training.gradient_weight)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % training.log_every == 0:
                history.append({"step": step, "loss": loss.item()})
                log.info("autoencoder step %d loss %.4f", step, loss.item())
    return _finish(vae, pixels[: training.measured_pictures], training.latent_noise), history


@torch.no_grad()
def _finish(vae: AutoencoderKLQwenImage, pixels: torch.Tensor, latent_noise: float) -> AutoencoderKLQwenImage:
    """Measure the latents on `pixels` for the config, fix the encoder's variance, and check the patched layers."""
    with single_frame_layers():
        latents = _encode(vae, pixels)
        decoded = _decode(vae, latents).clamp(-1, 1)
    vae.register_to_config(
        latents_mean=latents.mean(dim=(0, 2, 3, 4)).tolist(), latents_std=latents.std(dim=(0, 2, 3, 4)).tolist()
    )
    vae.quant_conv.weight[LATENT_CHANNELS:] = 0  # the log-variances: constant, that of the noise in training
    vae.quant_conv.bias[LATENT_CHANNELS:] = 2 * (latent_noise * latents.std()).log()
    torch.testing.assert_close(vae.encode(pixels).latent_dist.mode(), latents, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(vae.decode(latents).sample, decoded, rtol=1e-3, atol=1e-3)
    return vae.eval()


@torch.no_grad()
def encode_normalised(vae: AutoencoderKLQwenImage, pictures: np.ndarray, batch: int = 256) -> torch.Tensor:
    """uint8 grey [N, 16, 32] -> latents [N, 16, 1, 4, 8] of mean 0 and standard deviation 1 in each channel."""
    shape = (1, LATENT_CHANNELS, 1, 1, 1)
    mean, std = (torch.tensor(values).view(shape) for values in (vae.config.latents_mean, vae.config.latents_std))
    pixels = as_pixels(pictures)
    with single_frame_layers():
        return torch.cat([(_encode(vae, part) - mean) / std for part in pixels.split(batch)])


@torch.no_grad()
def reconstruct(vae: AutoencoderKLQwenImage, pictures: np.ndarray) -> np.ndarray:
    """uint8 grey [N, 16, 32] through the autoencoder and back, by its public methods. Returns uint8 [N, 16, 32, 3]."""
    return as_pictures(vae.decode(vae.encode(as_pixels(pictures)).latent_dist.mode()).sample)
