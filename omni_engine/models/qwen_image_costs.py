# SPDX-License-Identifier: Apache-2.0
"""What Qwen-Image costs: weights, work and kept activations of each part, counted from its layers.

Legend: I image tokens, T text tokens, S = I + T, H hidden, D head size, C latent channels, E text embedding, F features
of the time (256), O output features of a token. Numbers are of one sample.

Work, in multiply-adds of a forward pass (2 FLOPs each; biases, norms, gates, rotations and softmax are left out, as MFU
leaves them out: together they are below a percent):

| part | term | multiply-adds | why |
| --- | --- | --- | --- |
| block | image linears | 12 H^2 I | q, k, v 3 H^2; output H^2; MLP 4 H^2 in and 4 H^2 out |
| block | text linears | 12 H^2 T | the same; 3 H^2 T in the last block, whose text tail (output, MLP) is not computed |
| block | attention | 2 S^2 H | scores S^2 D and values S^2 D a head |
| block | modulation | 12 H^2 | 6 H^2 a stream, on one conditioning row: a third of the weights, next to no work |
| embedding | image, text, time | C H I + E H T + F H + H^2 | |
| head | modulation, output | 2 H^2 + H O I | |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from omni_engine.models.communication import Layer
from omni_engine.models.qwen_image_layers import qwen_image_network
from omni_engine.models.stages import Activation, BlockSpec, ModelSpec, Moment, Weights

if TYPE_CHECKING:
    from omni_engine.arguments import LoraSettings
    from omni_engine.models.qwen_image import QwenImageConfig

_EMBEDDING_NAMES = (
    "img_in",
    "txt_in",
    "",
    "time_text_embed.timestep_embedder.linear_1",
    "time_text_embed.timestep_embedder.linear_2",
)
_BLOCK_NAMES = (
    *("img_mod.1", "to_q to_k to_v", "", "", "to_out.0", "img_mlp.net.0.proj", "img_mlp.net.2"),
    *("txt_mod.1", "add_q_proj add_k_proj add_v_proj", "", "", "to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    "",
)
_HEAD_NAMES = ("norm_out.linear", "proj_out", "")
"""Hugging Face names of the layers, in the order of `qwen_image_network`; a fused layer has several."""


def qwen_image_spec(
    config: QwenImageConfig,
    image_tokens: int,
    text_tokens: int,
    *,
    context_parallel: bool = False,
    lora: LoraSettings | None = None,
) -> ModelSpec:
    """The network for samples of these lengths, padding included where it is computed.

    Args:
        context_parallel: the tokens of a sample are divided, and attention exchanges them.
        lora: trains adapters beside frozen weights where it is enabled.
    """
    network = qwen_image_network(config)
    tokens = {"image": image_tokens, "text": text_tokens, "rows": 1, "joint": image_tokens + text_tokens}
    adapters = lora if lora is not None and lora.enabled else None
    modulated = adapters is None or any("mod.1" in target for target in adapters.lora_target_modules)

    def block(is_last: bool) -> BlockSpec:
        layers = network.blocks[-1 if is_last else 0]
        kept_text = 0 if is_last else text_tokens
        kept = (
            *_kept_by_attention(config, image_tokens, text_tokens, context_parallel),
            *_kept_by_mlp(config, image_tokens, kept_text),
        )
        spec = _part("double_stream", layers, _BLOCK_NAMES, tokens, adapters)
        return replace(
            spec,
            kept=kept if modulated else tuple(one for one in kept if not one.name.endswith(_FOR_MODULATION)),
            forward=_forward(config, image_tokens, text_tokens),
            backward=_backward(config, image_tokens, text_tokens, kept_text, adapted=adapters is not None),
            largest=6 * config.hidden_size**2 if adapters is None else 0,
            gradient=4 * config.hidden_size**2 if adapters is None else 0,
            gathered=image_tokens * config.hidden_size,
        )

    embedding = _part("embedding", network.embedding, _EMBEDDING_NAMES, tokens, adapters)
    head = _part("head", network.head, _HEAD_NAMES, tokens, adapters)
    return ModelSpec(
        embedding=_embedding(config, embedding, tokens, adapters),
        blocks=(*[block(is_last=False)] * (config.num_layers - 1), block(is_last=True)),
        head=_head(config, head, tokens, adapters),
    )


def _part(
    kind: str, layers: Sequence[Layer], names: Sequence[str], tokens: dict[str, int], lora: LoraSettings | None
) -> BlockSpec:
    """Weights and work of a part's layers, with adapters where there are any."""
    weights, trained, idle, work = Weights(), Weights(), 0, dict[str, int]()
    frozen_work = 0
    for layer, name in zip(layers, names, strict=True):
        own = _weights(layer)
        weights += own
        idle += own.total if layer.stream == "rows" else 0
        if layer.idle:
            continue
        term, multiply_adds = _work(layer, tokens[layer.stream])
        if multiply_adds:
            work[term] = work.get(term, 0) + multiply_adds
        if lora is None:
            trained += own
            continue
        frozen_work += 0 if layer.kind == "attention" else multiply_adds
        adapter = _adapter(layer, name, lora)
        weights += adapter
        trained += adapter
        if adapter.total:
            work["adapters"] = work.get("adapters", 0) + adapter.total * tokens[layer.stream]
    return BlockSpec(kind, weights, trained, idle, work, frozen_work)


def _weights(layer: Layer) -> Weights:
    """How a layer's parameters lie on the tensor-parallel ranks."""
    if layer.kind in ("column", "modulation"):
        return Weights((layer.inputs + 1) * layer.outputs)
    if layer.kind == "row":
        return Weights(layer.inputs * layer.outputs, layer.outputs)
    return Weights(replicated=sum(layer.parameters(1)))


def _work(layer: Layer, tokens: int) -> tuple[str, int]:
    """Term and multiply-adds of a layer."""
    if layer.kind == "attention":
        return "attention", 2 * tokens * tokens * layer.outputs
    if layer.kind in ("vector", "head_norm", "gather"):
        return "", 0
    term = "modulation" if layer.stream == "rows" else f"{layer.stream} linears"
    return term, layer.inputs * layer.outputs * tokens


def _adapter(layer: Layer, name: str, lora: LoraSettings) -> Weights:
    """A of [r, in] and B of [out, r] for each adapted source of a layer; see parallel/lora.py."""
    sources = name.split()
    adapted = sum(any(f".{source}".endswith(f".{target}") for target in _last(lora)) for source in sources)
    if not adapted:
        return Weights()
    down = adapted * lora.lora_rank * layer.inputs
    up = adapted * lora.lora_rank * layer.outputs // len(sources)
    if layer.kind in ("column", "modulation"):
        return Weights(up, down)
    return Weights(down, up) if layer.kind == "row" else Weights(replicated=down + up)


def _last(lora: LoraSettings) -> list[str]:
    """Targets without the folders of a block that Hugging Face puts some layers in."""
    return [target.removeprefix("attn.") for target in lora.lora_target_modules]


_FOR_MODULATION = (": normed for attention", ": normed for the MLP", ": update by attention", ": update by the MLP")
"""What only the gradients of scales and gates need."""


def _kept_by_attention(config: QwenImageConfig, image: int, text: int, context_parallel: bool) -> Iterator[Activation]:
    """What autograd keeps of a block's first half, in the order in which it is made.

    Left out: what the samples of a micro-batch share (rotations and head-norm weights by token), below a percent.
    """
    hidden, heads, joint = config.hidden_size, config.num_attention_heads, image + text
    yield Activation("modulation", 2 * 6 * hidden, "none", until="selective")
    yield Activation("one plus scale", 2 * 2 * hidden, "none")
    for stream, tokens in (("image", image), ("text", text)):
        yield Activation(f"{stream}: block input", tokens * hidden, "tokens", until="full")
        yield Activation(f"{stream}: statistics of the first norm", 2 * tokens, "tokens", wide=True)
        yield Activation(f"{stream}: normed for attention", tokens * hidden, "tokens")
        yield Activation(f"{stream}: modulated for attention", tokens * hidden, "tokens")
    yield Activation("queries, keys, values", 3 * joint * hidden, "heads", until="selective")
    yield Activation("statistics of the head norm", 2 * joint * heads, "heads", wide=True)
    if context_parallel:
        # Exchanged tensors have memory of their own.
        yield Activation("rotated queries and keys, values, exchanged", 3 * joint * hidden, "heads", until="selective")
        yield Activation("attention output, before the exchange", joint * hidden, "heads", until="selective")
    else:
        yield Activation("rotated queries and keys", 2 * joint * hidden, "heads")
    yield Activation("attention output", joint * hidden, "heads", until="selective")
    yield Activation("log-sum-exp of attention", joint * heads, "heads", until="selective", wide=True)


def _kept_by_mlp(config: QwenImageConfig, image: int, text: int) -> Iterator[Activation]:
    """What autograd keeps of a block's second half: output of attention, MLP."""
    hidden = config.hidden_size
    for stream, tokens in (("image", image), ("text", text)):
        yield Activation(f"{stream}: update by attention", tokens * hidden, "tokens", until="selective")
        yield Activation(f"{stream}: residual after attention", tokens * hidden, "tokens", until="selective")
        yield Activation(f"{stream}: statistics of the second norm", 2 * tokens, "tokens", wide=True)
        yield Activation(f"{stream}: normed for the MLP", tokens * hidden, "tokens")
        yield Activation(f"{stream}: modulated for the MLP", tokens * hidden, "tokens")
        yield Activation(f"{stream}: before GELU", 4 * tokens * hidden, "heads", until="selective")
        yield Activation(f"{stream}: after GELU", 4 * tokens * hidden, "heads")
        yield Activation(f"{stream}: update by the MLP", tokens * hidden, "tokens", until="selective")


def _forward(config: QwenImageConfig, image: int, text: int) -> tuple[Moment, ...]:
    """Without a graph; read off torch's allocations."""
    hidden, joint = config.hidden_size, image + text
    inputs = Activation("input of the stage and of the block", 2 * joint * hidden, "tokens")
    rotary = (
        inputs,
        Activation("queries, keys, values by stream and joined, normed, rotated", 10 * joint * hidden, "heads"),
        Activation("queries and keys before and after rotation in float32", 4 * joint * hidden, "heads", wide=True),
    )
    second_matrix = (
        inputs,
        Activation("residual after attention, update", 2 * image * hidden, "tokens"),
        Activation("queries, keys, values by stream and joined, attention output", 7 * joint * hidden, "heads"),
        Activation("before and after GELU", 8 * image * hidden, "heads"),
    )
    return Moment(rotary), Moment(second_matrix)


def _backward(
    config: QwenImageConfig, image: int, text: int, kept_text: int, adapted: bool
) -> dict[str, tuple[Moment, ...]]:
    """Read off torch's allocations; the tests hold it against them. `kept_text`: 0 where the text has no MLP."""
    hidden, joint = config.hidden_size, image + text
    residuals = Activation("gradients of the residuals", joint * hidden, "tokens")
    update = (Activation("image: update by the MLP", image * hidden, "tokens"),)
    ways = 1 if adapted else 0  # the gradient of an input comes by way of the weight and of its adapter
    second_matrix = (
        residuals,
        Activation("gradient of the update", image * hidden, "tokens"),
        Activation("gradient after GELU", (1 + ways) * 4 * image * hidden, "heads"),
    )
    gelu = (residuals, Activation("GELU made again, gradients around it", (3 + ways) * 4 * image * hidden, "heads"))
    projections = Activation("gradients of queries, keys, values", 5 * joint * hidden, "heads")

    def head_norm(wide: int) -> tuple[Activation, ...]:
        name = "queries and keys, normed, and their gradients in float32"
        return residuals, projections, Activation(name, 2 * wide * joint * hidden, "heads", wide=True)

    attended = Activation("attention output", joint * hidden, "heads")
    rotated = Activation("rotated queries and keys", 2 * joint * hidden, "heads")
    mlp = tuple(_kept_by_mlp(config, image, kept_text))
    still_kept = tuple(one for one in mlp if one.survives("selective"))
    return {
        "none": (Moment(second_matrix, update), Moment(head_norm(4), (*mlp, attended, rotated))),
        # What is made again is there besides.
        "selective": (Moment(gelu, update), Moment(head_norm(5), (*still_kept, attended))),
    }


def _embedding(
    config: QwenImageConfig, part: BlockSpec, tokens: dict[str, int], lora: LoraSettings | None
) -> BlockSpec:
    if lora is not None:  # no gradient goes back to it
        return part
    kept = (
        Activation("latents", config.in_channels * tokens["image"], "tokens", until="full"),
        Activation("text, normed text", 2 * config.joint_attention_dim * tokens["text"], "tokens", until="full"),
        Activation("time", 4 * config.hidden_size, "none", until="full"),
    )
    return replace(part, kept=kept)


def _head(config: QwenImageConfig, part: BlockSpec, tokens: dict[str, int], lora: LoraSettings | None) -> BlockSpec:
    hidden, image = config.hidden_size, tokens["image"]
    for_inputs = (
        Activation("last residual", hidden * image, "tokens", until="full"),
        Activation("statistics of the norm", 2 * image, "tokens", until="full", wide=True),
    )
    for_weights = (
        Activation("modulation", 3 * hidden, "none", until="full"),
        Activation("normed", hidden * image, "tokens", until="full"),
        Activation("modulated", hidden * image, "tokens", until="full"),
    )
    return replace(part, kept=for_inputs if lora is not None else (*for_inputs, *for_weights))
