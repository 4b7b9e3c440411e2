# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image: a double-stream MMDiT with one conditioning row, after diffusers' `QwenImageTransformer2DModel`.

Shape legend: B batch, I image tokens, T text tokens, S joint tokens, H hidden, h heads of this rank, D head size,
C latent channels (packed), E text embedding. Tokens come first inside the network: [S, B, H], as Megatron has it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig

from omni_engine.arguments import LoraSettings, ParallelSettings
from omni_engine.flow import Schedule, SchedulerConfig, flow_match_schedule, true_cfg
from omni_engine.models.communication import Network
from omni_engine.models.family import DenoiserInput, LatentShape, Stage, register_family
from omni_engine.models.layers.attention import QKNorm, joint_attention, normalize_heads
from omni_engine.models.layers.embedding import sinusoidal_embedding
from omni_engine.models.layers.modulation import gated_residual, layer_norm_modulate
from omni_engine.models.layers.recompute import consume
from omni_engine.models.layers.rotary import apply_rotary, qwen_image_frequencies
from omni_engine.models.mapping import ModelMapping, ParameterMapping, column, replicated, row
from omni_engine.models.qwen_image_components import QwenImageComponents
from omni_engine.models.qwen_image_costs import qwen_image_spec
from omni_engine.models.qwen_image_layers import TIME_CHANNELS, qwen_image_network
from omni_engine.models.stages import ModelSpec
from omni_engine.parallel import (
    ModulationLinear,
    ParallelGroups,
    ReplicatedLinear,
    Segment,
    TokenSharding,
    layer_spec,
    pack,
    pipeline_options,
    unpack,
)
from omni_engine.platform import get_platform
from omni_engine.platform.attention_kernels import AttentionKernel

EPS = 1e-6
PATCH = 2


@dataclass(frozen=True)
class QwenImageConfig:
    """The fields of `transformer/config.json` that shape the network.

    Raises (from_json):
        ValueError: the folder holds a variant that this family does not implement.
    """

    in_channels: int
    out_channels: int
    num_layers: int
    attention_head_dim: int
    num_attention_heads: int
    joint_attention_dim: int
    axes_dims_rope: tuple[int, int, int]

    @property
    def hidden_size(self) -> int:
        return self.attention_head_dim * self.num_attention_heads

    @staticmethod
    def from_json(path: Path) -> QwenImageConfig:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for option in ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope"):
            if raw.get(option):
                raise ValueError(f"{path}: '{option}' is set; this Qwen-Image variant is not supported yet")
        if raw.get("patch_size", PATCH) != PATCH:
            raise ValueError(f"{path}: patch_size {raw['patch_size']} is not supported, only {PATCH}")
        config = QwenImageConfig(
            in_channels=raw["in_channels"],
            out_channels=raw["out_channels"] or raw["in_channels"],
            num_layers=raw["num_layers"],
            attention_head_dim=raw["attention_head_dim"],
            num_attention_heads=raw["num_attention_heads"],
            joint_attention_dim=raw["joint_attention_dim"],
            axes_dims_rope=tuple(raw["axes_dims_rope"]),
        )
        if sum(config.axes_dims_rope) != config.attention_head_dim:
            raise ValueError(
                f"{path}: axes_dims_rope {config.axes_dims_rope} must sum to attention_head_dim "
                f"{config.attention_head_dim}"
            )
        return config


class QwenImageStream(torch.nn.Module):
    """The weights of one stream (image or text) in one block."""

    def __init__(self, config: QwenImageConfig, megatron: TransformerConfig, remake: bool):
        """`remake`: element-wise results are made again in the backward pass."""
        super().__init__()
        hidden, layers = config.hidden_size, layer_spec(megatron)
        self.remake = remake
        self.head_dim = config.attention_head_dim
        self.modulation = ModulationLinear(hidden, 6 * hidden, megatron)
        self.qkv = layers.column_linear(hidden, 3 * hidden, megatron)
        self.qk_norm = QKNorm(self.head_dim, megatron.params_dtype, get_platform().device())
        self.out = layers.row_linear(hidden, hidden, megatron)
        self.mlp_in = layers.column_linear(hidden, 4 * hidden, megatron)
        self.mlp_out = layers.row_linear(4 * hidden, hidden, megatron)

    def project(self, x: torch.Tensor, modulation: list[torch.Tensor]) -> torch.Tensor:
        """Queries, keys and values [S, B, 3, h, D] of this stream's tokens [S, B, H]."""
        qkv = consume(self.qkv, layer_norm_modulate, x, modulation[0], modulation[1], remake=self.remake)
        return qkv.unflatten(-1, (3, -1, self.head_dim))

    def finish(self, x: torch.Tensor, attended: torch.Tensor, modulation: list[torch.Tensor]) -> torch.Tensor:
        """Output projection and MLP, each gated onto the residual stream."""
        _, _, gate_attention, shift, scale, gate_mlp = modulation
        x = gated_residual(x, gate_attention, self.out(attended))
        inner = consume(self.mlp_in, layer_norm_modulate, x, shift, scale, remake=self.remake)
        return gated_residual(x, gate_mlp, consume(self.mlp_out, _gelu, inner, remake=self.remake))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


class QwenImageBlock(torch.nn.Module):
    """Two streams, one joint attention."""

    def __init__(
        self,
        config: QwenImageConfig,
        megatron: TransformerConfig,
        is_last: bool,
        groups: ParallelGroups,
        kernel: AttentionKernel,
        recompute: str,
    ):
        super().__init__()
        self.remake = recompute == "selective"
        self.image = QwenImageStream(config, megatron, self.remake)
        self.text = QwenImageStream(config, megatron, self.remake)
        self.is_last = is_last
        self.groups, self.kernel = groups, kernel
        if is_last:
            # Nothing reads the text stream after the last block. Its weights are kept, but there is nothing to learn.
            for unread in (self.text.out, self.text.mlp_in, self.text.mlp_out):
                unread.requires_grad_(False)

    def forward(
        self,
        image: torch.Tensor,
        text: torch.Tensor,
        rows: torch.Tensor,
        frequencies: torch.Tensor,
        key_mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One block on this context rank's tokens.

        Args:
            image, text: residual streams [I, B, H] and [T, B, H] (divided over tp under sequence parallel).
            rows: activated conditioning rows [R, B, H].
            frequencies: [T + I, D/2] complex64, text first.
            key_mask: [B, (T + I) * cp] bool of all tokens, or None.
        """
        image_modulation = list(self.image.modulation(rows).chunk(6, dim=-1))
        text_modulation = list(self.text.modulation(rows).chunk(6, dim=-1))
        image_qkv = self.image.project(image, image_modulation)
        text_qkv = self.text.project(text, text_modulation)
        lengths = [text_qkv.shape[0], image_qkv.shape[0]]
        # Joined before the norm: what the backward pass keeps is then one tensor, of which values are a view.
        qkv = torch.cat([text_qkv, image_qkv])
        weight = torch.cat([self.text.qk_norm(lengths[0]), self.image.qk_norm(lengths[1])])

        def place(qk: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return apply_rotary(normalize_heads(qk, weight, EPS), frequencies)

        def attend(qk: torch.Tensor) -> torch.Tensor:
            return joint_attention(qk, qkv[:, :, 2], key_mask, self.groups, self.kernel)

        attended = consume(attend, place, qkv[:, :, :2], weight, remake=self.remake)
        text_attended, image_attended = attended.split(lengths)
        image = self.image.finish(image, image_attended, image_modulation)
        if not self.is_last:
            text = self.text.finish(text, text_attended, text_modulation)
        return image, text


class QwenImageStage(Stage):
    """One (virtual) pipeline stage: its blocks, the embeddings on the first stage and the head on the last."""

    def __init__(
        self,
        config: QwenImageConfig,
        megatron: TransformerConfig,
        blocks: range,
        groups: ParallelGroups,
        kernel: AttentionKernel,
        recompute: str,
    ):
        super().__init__(config=megatron)
        self.model = config
        is_first, is_last = blocks.start == 0, blocks.stop == config.num_layers
        self.pre_process, self.post_process, self.recompute = is_first, is_last, recompute
        self.sharding = TokenSharding.of(groups, megatron.sequence_parallel)
        # What Megatron's schedules ask every model for.
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = False
        self.vp_stage: int | None = None
        self.input_tensor: torch.Tensor | None = None
        hidden = config.hidden_size
        if is_first:
            self.image_in = ReplicatedLinear(config.in_channels, hidden, megatron, on_tokens=True)
            self.text_in = ReplicatedLinear(config.joint_attention_dim, hidden, megatron, on_tokens=True)
            self.text_norm = layer_spec(megatron).rms_norm(config.joint_attention_dim, EPS, megatron)
            self.time_in = ReplicatedLinear(TIME_CHANNELS, hidden, megatron, on_tokens=False)
            self.time_out = ReplicatedLinear(hidden, hidden, megatron, on_tokens=False)
        self.blocks = torch.nn.ModuleDict(
            {
                str(index): QwenImageBlock(config, megatron, index == config.num_layers - 1, groups, kernel, recompute)
                for index in blocks
            }
        )
        if is_last:
            self.head_modulation = ModulationLinear(hidden, 2 * hidden, megatron)
            self.head = ReplicatedLinear(hidden, PATCH * PATCH * config.out_channels, megatron, on_tokens=True)

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor]) -> None:
        """Megatron hands over what the previous stage sent."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def segments(self, inputs: DenoiserInput) -> list[Segment]:
        """Layout of the tensor between stages, on this rank."""
        image, text = self._tokens(inputs)
        return [
            Segment("image", self.sharding.local(image)),
            Segment("text", self.sharding.local(text)),
            Segment("rows", 1),
        ]

    def forward(self, inputs: DenoiserInput) -> torch.Tensor:
        """Velocity [B, I, C] float32 on the last stage, else the packed tensor [S, B, H] for the next one."""
        parts = self._embed(inputs) if self.pre_process else self._received(inputs)
        image, text, rows = parts["image"], parts["text"], parts["rows"]
        activated = F.silu(rows)
        frequencies = self._frequencies(inputs, image.device)
        key_mask = self._key_mask(inputs, image.device)
        for block in self.blocks.values():
            if self.recompute == "full" and torch.is_grad_enabled():
                image, text = torch.utils.checkpoint.checkpoint(
                    block, image, text, activated, frequencies, key_mask, use_reentrant=False, preserve_rng_state=False
                )
            else:
                image, text = block(image, text, activated, frequencies, key_mask)
        if not self.post_process:
            return pack({"image": image, "text": text, "rows": rows}, self.segments(inputs))
        scale, shift = self.head_modulation(activated).chunk(2, dim=-1)
        velocity = self.head(layer_norm_modulate(image, shift, scale))
        return self.sharding.gather(velocity, inputs.latents["image"].shape[1]).transpose(0, 1).float()

    @staticmethod
    def _tokens(inputs: DenoiserInput) -> tuple[int, int]:
        """Image and text tokens of a sample, the text's padding to the longest included."""
        return inputs.latents["image"].shape[1], inputs.text.embeddings.shape[1]

    def _frequencies(self, inputs: DenoiserInput, device: torch.device) -> torch.Tensor:
        """Rotation [T + I, D/2] of the tokens that this context rank attends with, by their place in the whole."""
        image, text = self._tokens(inputs)
        whole = qwen_image_frequencies(inputs.grid, text, self.model.axes_dims_rope, device)
        return torch.cat([self.sharding.take_context(part) for part in whole.split([text, image])])

    def _embed(self, inputs: DenoiserInput) -> dict[str, torch.Tensor]:
        dtype = self.config.params_dtype
        image = inputs.latents["image"].to(dtype).transpose(0, 1)
        text = inputs.text.embeddings.to(dtype).transpose(0, 1)
        image, text = self.sharding.take(image), self.sharding.take(text)
        time = sinusoidal_embedding(inputs.time, TIME_CHANNELS).to(dtype)
        return {
            "image": self.image_in(image),
            "text": self.text_in(self.text_norm(text)),
            "rows": self.time_out(F.silu(self.time_in(time)))[None],
        }

    def _received(self, inputs: DenoiserInput) -> dict[str, torch.Tensor]:
        if self.input_tensor is None:
            raise RuntimeError("a later pipeline stage ran before it received the previous stage's tensor")
        return unpack(self.input_tensor, self.segments(inputs))

    def _key_mask(self, inputs: DenoiserInput, device: torch.device) -> torch.Tensor | None:
        """[B, (T + I) * cp], False on padding of text and image; None when no sample has any."""
        (image, text), lengths = self._tokens(inputs), inputs.text.lengths
        if self.sharding.padded(image) == image and all(length == self.sharding.padded(text) for length in lengths):
            return None
        valid_text = torch.arange(text, device=device) < torch.tensor(lengths, device=device)[:, None]
        valid_image = valid_text.new_ones(len(lengths), image)
        return self.sharding.key_mask([valid_text, valid_image])


def _stream_mapping(
    stream: str, modulation: str, attention: tuple[str, ...], out: str, mlp: str
) -> list[ParameterMapping]:
    ours, theirs = f"blocks.{{}}.{stream}", "transformer_blocks.{}"
    q_norm, k_norm = {"image": ("norm_q", "norm_k"), "text": ("norm_added_q", "norm_added_k")}[stream]
    return [
        *column(f"{ours}.modulation", f"{theirs}.{modulation}.1"),
        *column(f"{ours}.qkv", *(f"{theirs}.attn.{name}" for name in attention)),
        ParameterMapping(f"{ours}.qk_norm.q_layernorm", (f"{theirs}.attn.{q_norm}.weight",), None),
        ParameterMapping(f"{ours}.qk_norm.k_layernorm", (f"{theirs}.attn.{k_norm}.weight",), None),
        *row(f"{ours}.out", f"{theirs}.attn.{out}"),
        *column(f"{ours}.mlp_in", f"{theirs}.{mlp}.net.0.proj"),
        *row(f"{ours}.mlp_out", f"{theirs}.{mlp}.net.2"),
    ]


MAPPING = [
    *replicated("image_in", "img_in"),
    *replicated("text_in", "txt_in"),
    ParameterMapping("text_norm.weight", ("txt_norm.weight",), None),
    *replicated("time_in", "time_text_embed.timestep_embedder.linear_1"),
    *replicated("time_out", "time_text_embed.timestep_embedder.linear_2"),
    *_stream_mapping("image", "img_mod", ("to_q", "to_k", "to_v"), "to_out.0", "img_mlp"),
    *_stream_mapping("text", "txt_mod", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "txt_mlp"),
    *column("head_modulation", "norm_out.linear"),
    *replicated("head", "proj_out"),
]


@register_family("qwen_image")
class QwenImage:
    """The family, bound to a `QwenImagePipeline` folder."""

    name = "qwen_image"
    modality = "image"

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = QwenImageConfig.from_json(folder / "transformer" / "config.json")
        self.text_features = self.config.joint_attention_dim
        self.scheduler = SchedulerConfig.from_json(folder / "scheduler" / "scheduler_config.json")
        vae = json.loads((folder / "vae" / "config.json").read_text(encoding="utf-8"))
        self.pixels_per_patch = PATCH * 2 ** len(vae["temperal_downsample"])
        self.mapping = ModelMapping(MAPPING, self.config.num_layers)

    def latent_shape(self, height: int, width: int) -> LatentShape:
        """Packed latent of a picture of height x width pixels.

        Raises:
            ValueError: a side is not a multiple of the pixels of a patch.
        """
        if height % self.pixels_per_patch or width % self.pixels_per_patch:
            raise ValueError(f"{height}x{width} pixels: both sides must be multiples of {self.pixels_per_patch}")
        grid = (1, height // self.pixels_per_patch, width // self.pixels_per_patch)
        return LatentShape(grid[1] * grid[2], self.config.in_channels, grid)

    def schedule(self, num_inference_steps: int, height: int, width: int) -> Schedule:
        """The sigma table that `QwenImagePipeline` would use."""
        return flow_match_schedule(self.scheduler, num_inference_steps, self.latent_shape(height, width).tokens)

    def model_time(self, schedule: Schedule) -> torch.Tensor:
        """timesteps / 1000 in float32, rounded as the pipeline rounds it."""
        return schedule.timesteps / 1000

    def costs(
        self, image_tokens: int, text_tokens: int, *, context_parallel: bool = False, lora: LoraSettings | None = None
    ) -> ModelSpec:
        """Weights, work and kept activations of each part for samples of these lengths, padding included."""
        return qwen_image_spec(self.config, image_tokens, text_tokens, context_parallel=context_parallel, lora=lora)

    def network(self) -> Network:
        """The layers as communication sees them."""
        return qwen_image_network(self.config)

    def transformer_config(self, groups: ParallelGroups, parallel: ParallelSettings, bf16: bool) -> TransformerConfig:
        """Megatron's view of the model."""
        dtype = torch.bfloat16 if bf16 else torch.float32
        return TransformerConfig(
            num_layers=self.config.num_layers,
            hidden_size=self.config.hidden_size,
            num_attention_heads=self.config.num_attention_heads,
            params_dtype=dtype,
            bf16=bf16,
            normalization="RMSNorm",
            qk_layernorm=True,
            perform_initialization=False,
            transformer_impl=parallel.transformer_impl,
            gradient_accumulation_fusion=parallel.gradient_accumulation_fusion,
            **pipeline_options(groups, dtype),
            tensor_model_parallel_size=groups.tp_size,
            context_parallel_size=groups.cp_size,
            sequence_parallel=parallel.sequence_parallel,
        )

    def build_stage(
        self,
        config: TransformerConfig,
        groups: ParallelGroups,
        blocks: range,
        kernel: AttentionKernel,
        recompute: str,
    ) -> QwenImageStage:
        """A stage with these blocks, weights uninitialised."""
        return QwenImageStage(self.config, config, blocks, groups, kernel, recompute)

    def combine_guidance(self, conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
        """True CFG with the norm rescaled to the conditional branch's."""
        return true_cfg(conditional, unconditional, scale)

    def load_components(self, max_text_tokens: int) -> QwenImageComponents:
        """Prompt encoder and autoencoder of the folder."""
        return QwenImageComponents(self.folder, max_text_tokens)
