# SPDX-License-Identifier: Apache-2.0
"""Prompt encoder and autoencoder of Qwen-Image, run by diffusers from a normal pipeline folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import QwenImagePipeline

from omni_engine.platform import get_platform


class QwenImageComponents:
    """Encodes prompts to text embeddings and decodes packed latents to pictures. Frozen; no gradients.

    Raises:
        ValueError: the folder cannot be loaded as a QwenImagePipeline.
    """

    def __init__(self, folder: Path, max_text_tokens: int):
        try:
            pipeline = QwenImagePipeline.from_pretrained(
                folder, transformer=None, local_files_only=True, use_safetensors=True
            )
        # For a damaged file the libraries raise about anything, from OSError to Exception itself.
        except Exception as error:
            raise ValueError(
                f"{folder}: the text encoder, tokenizer or autoencoder cannot be loaded ({type(error).__name__}: "
                f"{error}); a file may be missing or truncated: copy or download the folder again"
            ) from error
        self.pipeline = pipeline.to(get_platform().device())
        self.pipeline.text_encoder.requires_grad_(False).eval()
        self.pipeline.vae.requires_grad_(False).eval()
        self.max_text_tokens = max_text_tokens
        self.folder = folder

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> list[torch.Tensor]:
        """Text embeddings [T_i, E] of each prompt, in the text encoder's dtype.

        Prompts are encoded one by one: the bits of an embedding must not depend on which prompts stand beside it, or a
        resumed run would differ from an unbroken one.

        Raises:
            ValueError: a prompt is longer than the limit, or an embedding is not finite.
        """
        rows = []
        for prompt in prompts:
            self._check_length(prompt)
            embeddings, _ = self.pipeline.encode_prompt(prompt, max_sequence_length=self.max_text_tokens)
            if not bool(torch.isfinite(embeddings).all()):
                raise ValueError(f"{self.folder}: the text encoder gave a non-finite embedding for prompt {prompt!r}")
            rows.append(embeddings[0])
        return rows

    def _check_length(self, prompt: str) -> None:
        """The pipeline would cut a long prompt in silence."""
        template = self.pipeline.prompt_template_encode.format(prompt)
        tokens = len(self.pipeline.tokenizer(template).input_ids) - self.pipeline.prompt_template_encode_start_idx
        if tokens > self.max_text_tokens:
            raise ValueError(
                f"a prompt has {tokens} tokens, --max-text-tokens allows {self.max_text_tokens}; shorten it: "
                f"{prompt[:80]!r}..."
            )

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Pictures uint8 [B, height, width, 3] on the host.

        Args:
            latents: packed [B, I, C] float32, normalised as the transformer has them.
        """
        vae = self.pipeline.vae
        unpacked = self.pipeline._unpack_latents(latents, height, width, self.pipeline.vae_scale_factor).to(vae.dtype)
        shape = (1, vae.config.z_dim, 1, 1, 1)
        mean = torch.tensor(vae.config.latents_mean, device=unpacked.device, dtype=unpacked.dtype).view(shape)
        std = torch.tensor(vae.config.latents_std, device=unpacked.device, dtype=unpacked.dtype).view(shape)
        pixels = vae.decode(unpacked * std + mean, return_dict=False)[0][:, :, 0]
        pixels = (pixels.float() * 0.5 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
        return pixels.permute(0, 2, 3, 1).contiguous().cpu()
