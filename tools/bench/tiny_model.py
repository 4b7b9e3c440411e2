# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen-Image folders with random weights, for tests that need no text encoder and no autoencoder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel


def make_transformer(
    layers: int = 2, heads: int = 4, head_dim: int = 16, channels: int = 16, text_dim: int = 24, seed: int = 0
) -> QwenImageTransformer2DModel:
    """A random transformer whose output, gates and biases are all well away from zero."""
    torch.manual_seed(seed)
    axes = {16: (4, 6, 6), 32: (8, 12, 12), 128: (16, 56, 56)}[head_dim]
    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=channels,
        out_channels=channels // 4,
        num_layers=layers,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        joint_attention_dim=text_dim,
        axes_dims_rope=axes,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.ndim == 1 and "linear" not in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim == 1:
                parameter.normal_(std=0.05)
            else:
                parameter.normal_(std=0.7 / parameter.shape[1] ** 0.5)
    return model.eval()


def save_folder(model: QwenImageTransformer2DModel, folder: Path, vae_downsamples: int = 2) -> Path:
    """Write what a family reads of a pipeline folder: transformer, scheduler config, autoencoder config."""
    model.save_pretrained(folder / "transformer")
    FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.7, max_shift=0.7, time_shift_type="exponential"
    ).save_pretrained(folder / "scheduler")
    (folder / "vae").mkdir(parents=True, exist_ok=True)
    vae = {"temperal_downsample": [False] * vae_downsamples, "z_dim": model.config.in_channels // 4}
    (folder / "vae" / "config.json").write_text(json.dumps(vae), encoding="utf-8")
    return folder
