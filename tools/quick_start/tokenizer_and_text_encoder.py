# SPDX-License-Identifier: Apache-2.0
"""A tokenizer and a text encoder so small that they ship with the repository, of the classes that Qwen-Image uses.

The pipeline wraps each prompt into a chat template and drops the first 34 tokens of the encoding. Here every word of
that template is one token, so 34 tokens are exactly the template before the prompt, as with the large tokenizer.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from diffusers import QwenImagePipeline
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

HIDDEN = 64
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CORPUS = [
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:",
    "system\nuser\nassistant\n",
    'the text "0123456789"',
]


def build_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE trained on CORPUS until each of its words is one token; digits stay single."""
    splitter = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [splitter, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    bpe.train_from_iterator(CORPUS, trainer)
    with tempfile.TemporaryDirectory() as folder:
        vocab_file, merges_file = bpe.model.save(folder)
        vocab = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
        lines = Path(merges_file).read_text(encoding="utf-8").splitlines()
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=[tuple(line.split(" ")) for line in lines if not line.startswith("#version")],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS[1:],
        model_max_length=4096,
        padding_side="right",
    )


def build_text_encoder(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Random Qwen2.5-VL: two text layers of width HIDDEN, and the least vision tower that the class accepts."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    text_config = {
        "vocab_size": 64 * ((len(tokenizer) + 63) // 64),
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,  # at this width the usual 0.02 would leave the layers without effect
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision_config = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(seed)
    return Qwen2_5_VLForConditionalGeneration(config).float().eval()


def check_template(pipeline: QwenImagePipeline, prompt: str) -> None:
    """Fail unless the dropped tokens are exactly the template before the prompt, and digits are single tokens."""
    start = pipeline.prompt_template_encode_start_idx
    before, _ = pipeline.prompt_template_encode.split("{}")
    tokens = pipeline.tokenizer.tokenize(pipeline.prompt_template_encode.format(prompt))
    dropped = pipeline.tokenizer.convert_tokens_to_string(tokens[:start])
    if dropped != before:
        raise ValueError(f"the pipeline drops {start} tokens, which are {dropped!r} instead of {before!r}")
    digits = [character for character in prompt if character.isdigit()]
    if [token for token in tokens if token.isdigit()] != digits:
        raise ValueError(f"the digits of {prompt!r} are not one token each: {tokens[start:]}")
