# SPDX-License-Identifier: Apache-2.0
"""What Qwen-Image costs: weights, work and kept activations of each part, counted from its shapes.

Legend: I image tokens, T text tokens, S = I + T, H hidden, D head size, C latent channels, E text embedding, F features
of the time (256). Numbers are of one sample.

Work, in multiply-adds of a forward pass (2 FLOPs each; biases, norms, gates, rotations and softmax are left out, as MFU
leaves them out: together they are below a percent):

| part | term | multiply-adds | why |
| --- | --- | --- | --- |
| block | image linears | 12 H^2 I | q, k, v 3 H^2; output H^2; MLP 4 H^2 in and 4 H^2 out |
| block | text linears | 12 H^2 T | the same; 3 H^2 T in the last block, whose text tail (output, MLP) is not computed |
| block | attention | 2 S^2 H | scores S^2 D and values S^2 D a head |
| block | modulation | 12 H^2 | 6 H^2 a stream, on one conditioning row: a third of the weights, next to no work |
| embedding | image, text, time | C H I + E H T + F H + H^2 | |
| head | modulation, output | 2 H^2 + H O I | O output features of a token |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from omni_engine.models.stages import BlockSpec, Kept, ModelSpec, Weights

if TYPE_CHECKING:
    from omni_engine.models.qwen_image import QwenImageConfig

TIME_CHANNELS = 256
PATCH_AREA = 4


def qwen_image_spec(config: QwenImageConfig, image_tokens: int, text_tokens: int) -> ModelSpec:
    """The network for samples of these lengths, padding included where it is computed."""
    block = _block(config, image_tokens, text_tokens, is_last=False)
    last = _block(config, image_tokens, text_tokens, is_last=True)
    return ModelSpec(
        embedding=_embedding(config, image_tokens, text_tokens),
        blocks=(*[block] * (config.num_layers - 1), last),
        head=_head(config, image_tokens),
    )


def _linear(inputs: int, outputs: int) -> int:
    """Weights and biases."""
    return inputs * outputs + outputs


def _block(config: QwenImageConfig, image: int, text: int, is_last: bool) -> BlockSpec:
    hidden, joint = config.hidden_size, image + text
    modulation = _linear(hidden, 6 * hidden)
    # Output and second MLP matrix are cut by row, so each rank holds their biases whole; so it does the norms' weights.
    tail = Weights(hidden * hidden + _linear(hidden, 4 * hidden) + 4 * hidden * hidden, 2 * hidden)
    front = Weights(modulation + _linear(hidden, 3 * hidden), 2 * config.attention_head_dim)
    text_tail = 0 if is_last else 9
    return BlockSpec(
        kind="double_stream",
        weights=front + tail + front + tail,
        # Nothing reads the text after the last block: its tail there is frozen.
        trained=front + tail + front if is_last else None,
        idle=2 * modulation,
        work={
            "image linears": 12 * hidden * hidden * image,
            "text linears": (3 + text_tail) * hidden * hidden * text,
            "attention": 2 * joint * joint * hidden,
            "modulation": 12 * hidden * hidden,
        },
        kept=tuple(_kept(config, image, text, is_last)),
    )


def _kept(config: QwenImageConfig, image: int, text: int, is_last: bool) -> Iterator[Kept]:
    """What autograd keeps of a block, in the order in which it is made.

    Left out: what the samples of a micro-batch share (rotations and head-norm weights by token), below a percent.
    """
    hidden, heads, joint = config.hidden_size, config.num_attention_heads, image + text
    yield Kept("modulation", 2 * 8 * hidden, "rows")
    for stream, tokens in (("image", image), ("text", text)):
        yield Kept(f"{stream}: block input", tokens * hidden, "tokens", until="full")
        yield Kept(f"{stream}: statistics of the first norm", 2 * tokens, "tokens", wide=True)
        yield Kept(f"{stream}: normed for attention", tokens * hidden, "tokens")
        yield Kept(f"{stream}: modulated for attention", tokens * hidden, "tokens")
    yield Kept("queries, keys, values", 3 * joint * hidden, "heads")
    yield Kept("statistics of the head norm", 2 * joint * heads, "heads", wide=True)
    yield Kept("rotated queries and keys", 2 * joint * hidden, "heads")
    yield Kept("attention output", joint * hidden, "heads")
    yield Kept("log-sum-exp of attention", joint * heads, "heads", wide=True)
    for stream, tokens in (("image", image),) if is_last else (("image", image), ("text", text)):
        yield Kept(f"{stream}: update by attention", tokens * hidden, "tokens")
        yield Kept(f"{stream}: residual after attention", tokens * hidden, "tokens")
        yield Kept(f"{stream}: statistics of the second norm", 2 * tokens, "tokens", wide=True)
        yield Kept(f"{stream}: normed for the MLP", tokens * hidden, "tokens")
        yield Kept(f"{stream}: modulated for the MLP", tokens * hidden, "tokens")
        yield Kept(f"{stream}: before GELU", 4 * tokens * hidden, "heads")
        yield Kept(f"{stream}: after GELU", 4 * tokens * hidden, "heads")
        yield Kept(f"{stream}: update by the MLP", tokens * hidden, "tokens")


def _embedding(config: QwenImageConfig, image: int, text: int) -> BlockSpec:
    hidden, channels, text_dim = config.hidden_size, config.in_channels, config.joint_attention_dim
    weights = _linear(channels, hidden) + _linear(text_dim, hidden) + text_dim
    weights += _linear(TIME_CHANNELS, hidden) + _linear(hidden, hidden)
    return BlockSpec(
        kind="embedding",
        weights=Weights(replicated=weights),
        idle=_linear(TIME_CHANNELS, hidden) + _linear(hidden, hidden),
        work={
            "image": channels * hidden * image,
            "text": text_dim * hidden * text,
            "time": TIME_CHANNELS * hidden + hidden * hidden,
        },
        kept=(
            Kept("latents", channels * image, "tokens", until="full"),
            Kept("text embeddings and normed text embeddings", 2 * text_dim * text, "tokens", until="full"),
            Kept("time", TIME_CHANNELS + 4 * hidden, "rows", until="full"),
        ),
    )


def _head(config: QwenImageConfig, image: int) -> BlockSpec:
    hidden, features = config.hidden_size, PATCH_AREA * config.out_channels
    return BlockSpec(
        kind="head",
        weights=Weights(_linear(hidden, 2 * hidden), _linear(hidden, features)),
        idle=_linear(hidden, 2 * hidden),
        work={"modulation": 2 * hidden * hidden, "output": hidden * features * image},
        kept=(
            Kept("modulation", 3 * hidden, "rows", until="full"),
            Kept("last residual", hidden * image, "tokens", until="full"),
            Kept("statistics of the norm", 2 * image, "tokens", until="full", wide=True),
            Kept("normed", hidden * image, "tokens", until="full"),
            Kept("modulated", hidden * image, "tokens", until="full"),
        ),
    )
