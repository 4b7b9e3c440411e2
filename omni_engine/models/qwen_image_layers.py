# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image's layers, in the order of the stage's parameters: what communication and costs are counted from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_engine.models.communication import Layer, Network

if TYPE_CHECKING:
    from omni_engine.models.qwen_image import QwenImageConfig

TIME_CHANNELS = 256
PATCH_AREA = 4


def qwen_image_network(config: QwenImageConfig) -> Network:
    """The network: two streams, one conditioning row a sample."""
    hidden, velocity = config.hidden_size, PATCH_AREA * config.out_channels
    block = _block(config, is_last=False)
    return Network(
        hidden=hidden,
        streams=("image", "text"),
        embedding=(
            Layer("replicated", "image", config.in_channels, hidden),
            Layer("replicated", "text", config.joint_attention_dim, hidden),
            Layer("vector", "text", config.joint_attention_dim, config.joint_attention_dim),
            Layer("replicated", "rows", TIME_CHANNELS, hidden),
            Layer("replicated", "rows", hidden, hidden),
        ),
        blocks=(*[block] * (config.num_layers - 1), _block(config, is_last=True)),
        head=(
            Layer("modulation", "rows", hidden, 2 * hidden),
            Layer("replicated", "image", hidden, velocity),
            Layer("gather", "image", velocity, velocity),
        ),
    )


def _block(config: QwenImageConfig, is_last: bool) -> tuple[Layer, ...]:
    hidden, head = config.hidden_size, config.attention_head_dim
    layers: list[Layer] = []
    for stream in ("image", "text"):
        unread = is_last and stream == "text"  # nothing reads the text after the last block
        layers += [
            Layer("modulation", "rows", hidden, 6 * hidden),
            Layer("column", stream, hidden, 3 * hidden),
            Layer("head_norm", stream, head, head),
            Layer("head_norm", stream, head, head),
            Layer("row", stream, hidden, hidden, idle=unread),
            Layer("column", stream, hidden, 4 * hidden, idle=unread),
            Layer("row", stream, 4 * hidden, hidden, idle=unread),
        ]
    return (*layers, Layer("attention", "joint", hidden, hidden))
