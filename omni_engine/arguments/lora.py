# SPDX-License-Identifier: Apache-2.0
"""Settings of low-rank adapters (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omni_engine.arguments.flag import flag

# The twelve linear layers of a block that flow_grpo adapts in its Qwen-Image recipe: attention and MLP of both streams.
ATTENTION_AND_MLP = (
    *("to_q", "to_k", "to_v", "to_out.0"),
    *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
)


@dataclass(frozen=True)
class LoraSettings:
    """LoRA: train low-rank adapters beside frozen weights."""

    lora_rank: int = flag(
        0,
        at_least=0,
        source="peft (r)",
        help="Rank of the adapters; flow_grpo trains Qwen-Image with 64. 0: no adapters, all weights are trained.",
    )
    lora_alpha: float | None = flag(
        None,
        above=0,
        source="peft",
        help="An adapter adds alpha / rank times its product. Not given: twice the rank, as flow_grpo has it (64 and "
        "128).",
    )
    lora_target_modules: tuple[str, ...] = flag(
        ATTENTION_AND_MLP,
        nargs="+",
        source="peft (target_modules)",
        help="Linear layers that get an adapter: Hugging Face module names, or their last parts (to_q). The default is "
        "flow_grpo's for Qwen-Image; img_mod.1 and txt_mod.1 are the modulation.",
    )
    export_merged: bool = flag(
        False,
        help="With --lora-rank, --export-hf writes the whole pipeline with the adapters added to its weights, not the "
        "adapters alone.",
    )

    @property
    def enabled(self) -> bool:
        return self.lora_rank > 0

    @property
    def alpha(self) -> float:
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def scale(self) -> float:
        """What the product of an adapter's matrices is multiplied by."""
        return self.alpha / self.lora_rank

    def identity(self) -> dict[str, Any] | None:
        """What a checkpoint of adapters must be continued with; None without adapters."""
        if not self.enabled:
            return None
        return {"rank": self.lora_rank, "alpha": self.alpha, "target_modules": sorted(set(self.lora_target_modules))}
