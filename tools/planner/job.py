# SPDX-License-Identifier: Apache-2.0
"""What is planned for: a model, an iteration's work, a machine."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path

from omni_engine.arguments import LoraSettings, RolloutSettings
from omni_engine.arguments.pipeline_folder import read_pipeline_facts
from omni_engine.models import Family, build_family
from omni_engine.models.costs import Passes, Rollout, passes_of_branches

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {"qwen-image": ("qwen_image", ROOT / "configs" / "models" / "qwen_image")}
"""Models known by name: family, folder of the config files."""
PUBLISHED_COMPONENTS = {
    # Qwen2.5-VL-7B in bfloat16 (8,292,166,656 weights); the autoencoder's 126,892,531 weights, loaded in float32.
    "qwen-image": 2 * 8_292_166_656 + 4 * 126_892_531,
}
CACHED_PROMPTS = 4096
"""Text embeddings that `PromptEncoder` keeps."""


@dataclass(frozen=True)
class Model:
    """A model as planning needs it. `components_bytes`: the loaded text encoder and autoencoder."""

    name: str
    family: Family
    heads: int
    blocks: int
    components_bytes: int


@dataclass(frozen=True)
class Job:
    """What an iteration does.

    Attributes:
        height, width: of the images, in pixels.
        text_tokens: of the longest prompt, to which the others are padded.
        optimizer_step: see `costs.Training.step`.
    """

    model: Model
    height: int
    width: int
    text_tokens: int
    rollout: RolloutSettings
    micro_batch_size: int
    updates: int
    bf16: bool
    lora: LoraSettings = field(default_factory=LoraSettings)
    reference: bool = False
    average: bool = False
    engine: Rollout = field(default_factory=Rollout)
    optimizer_step: str = "fused"
    cached_prompts: int = CACHED_PROMPTS

    @property
    def family(self) -> Family:
        return self.model.family

    @property
    def image_tokens(self) -> int:
        return self.family.latent_shape(self.height, self.width).tokens

    @property
    def guided(self) -> bool:
        return self.rollout.true_cfg_scale > 1

    @property
    def branches(self) -> list[Passes]:
        """Passes on a sample, by branch of guidance."""
        return passes_of_branches(self.rollout, self.reference)

    @property
    def joint(self) -> int:
        """Branches that run together and have a gradient."""
        return 2 if self.guided and self.rollout.cfg_gradient == "both" else 1

    @property
    def prompts(self) -> int:
        return self.rollout.prompts_per_step

    @property
    def samples(self) -> int:
        return self.rollout.samples_per_step

    def samples_bytes(self, dp: int) -> float:
        """Trajectories of an iteration, which every rank of a replica holds, and the text embeddings that are kept."""
        shape = self.family.latent_shape(self.height, self.width)
        latents = 2 * 4 * shape.tokens * shape.channels * self.rollout.sde_window_size
        texts = (2 if self.bf16 else 4) * self.text_tokens * self.family.text_features
        return self.samples / dp * latents + self.cached_prompts * texts


@dataclass(frozen=True)
class Machine:
    """Devices and the links between them.

    Attributes:
        memory_bytes: of a device.
        reserved_bytes: of it that tensors cannot have: the device's context, buffers of the communication library,
            what the allocator cannot reuse.
        peak_flops: of dense matrix products in the network's dtype.
        efficiency: the part of it that is reached.
        bandwidth: bytes a second that a device sends within a machine; `slow_bandwidth`: between machines.
        per_node: devices of a machine.
    """

    devices: int
    memory_bytes: float
    reserved_bytes: float
    peak_flops: float
    efficiency: float
    bandwidth: float
    slow_bandwidth: float
    per_node: int

    @property
    def usable_bytes(self) -> float:
        return self.memory_bytes - self.reserved_bytes

    def bandwidth_of(self, extent: int) -> float:
        """Of a group whose members lie within `extent` neighbouring ranks."""
        return self.bandwidth if extent <= self.per_node else self.slow_bandwidth


def open_model(name: str, family: str) -> Model:
    """A model known by name, or a pipeline folder.

    Raises:
        ValueError, FileNotFoundError: neither a known name nor a folder with the config files.
    """
    if name in PUBLISHED:
        family, folder = PUBLISHED[name]
        components = PUBLISHED_COMPONENTS[name]
    else:
        folder = Path(name)
        if not folder.is_dir():
            raise FileNotFoundError(f"{name}: no such folder, and not one of the known names: {', '.join(PUBLISHED)}")
        components = components_bytes(folder)
    facts = read_pipeline_facts(str(folder))
    if facts.attention_heads is None or facts.layers is None:
        raise ValueError(f"{folder}/transformer/config.json does not tell num_attention_heads and num_layers")
    return Model(name, build_family(family, folder), facts.attention_heads, facts.layers, components)


def components_bytes(folder: Path) -> int:
    """Bytes of a loaded text encoder (in the dtype it is stored in) and autoencoder (diffusers loads it in float32).

    Read from the headers of the safetensors files; nothing where a folder holds none.
    """
    encoder = sum(size for path in (folder / "text_encoder").glob("*.safetensors") for _, size in _tensors(path))
    autoencoder = sum(4 * count for path in (folder / "vae").glob("*.safetensors") for count, _ in _tensors(path))
    return encoder + autoencoder


def _tensors(path: Path) -> list[tuple[int, int]]:
    """Elements and bytes of each tensor of a safetensors file.

    Raises:
        ValueError: the header cannot be read.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise ValueError(f"{path}: the header of the safetensors file cannot be read ({error})") from error
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    return [(math.prod(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0]) for entry in entries]
