# SPDX-License-Identifier: Apache-2.0
"""The corpus: three digits in Pillow's built-in font, grey, 16 x 32 pixels; and the split of the 1,000 strings."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

HEIGHT, WIDTH = 16, 32  # pixels
SPLIT_SEED = 20240611  # fixed for good: --seed changes the weights, never which strings are held out
SPLIT_SIZES = {"train": 700, "validation": 100, "held_out": 200}
SUPERSAMPLE = 4  # glyphs are drawn at four times the size, then box-filtered
FONT_SIZE = (10.0, 13.0)  # pixels, drawn uniformly
BACKGROUND, INK = (200, 255), (0, 90)  # grey levels, drawn uniformly
JITTER = 0.6  # share of the free margin that the position may use


def split_strings() -> dict[str, list[str]]:
    """All 1,000 three-digit strings, split into train, validation and held_out."""
    strings = [f"{number:03d}" for number in range(1000)]
    random.Random(SPLIT_SEED).shuffle(strings)
    split, start = {}, 0
    for name, size in SPLIT_SIZES.items():
        split[name] = strings[start : start + size]
        start += size
    return split


def prompt_of(string: str) -> str:
    """The prompt that asks for a picture of `string`; the reward takes what stands between the double quotes."""
    return f'the text "{string}"'


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size=size)


def render(string: str, rng: random.Random) -> np.ndarray:
    """Draw one picture with random size, position and contrast. Returns uint8 [HEIGHT, WIDTH]."""
    size = rng.uniform(*FONT_SIZE) * SUPERSAMPLE
    background, ink = rng.randint(*BACKGROUND), rng.randint(*INK)
    height, width = HEIGHT * SUPERSAMPLE, WIDTH * SUPERSAMPLE
    margin = 2 * SUPERSAMPLE  # left and right together
    font = _font(round(size))
    left, top, right, bottom = font.getbbox(string)
    if right - left > width - margin:
        font = _font(int(size * (width - margin) / (right - left)))
        left, top, right, bottom = font.getbbox(string)
    free_x, free_y = width - (right - left), height - (bottom - top)
    shift_x = rng.uniform(-1, 1) * JITTER * max(0.0, free_x / 2 - SUPERSAMPLE)
    shift_y = rng.uniform(-1, 1) * JITTER * max(0.0, free_y / 2 - SUPERSAMPLE)
    canvas = Image.new("L", (width, height), background)
    ImageDraw.Draw(canvas).text((free_x / 2 - left + shift_x, free_y / 2 - top + shift_y), string, fill=ink, font=font)
    return np.asarray(canvas.resize((WIDTH, HEIGHT), Image.Resampling.BOX))


def render_corpus(strings: list[str], count: int, seed: int) -> tuple[list[str], np.ndarray]:
    """Draw `count` pictures of strings picked at random. Returns the strings and uint8 [count, HEIGHT, WIDTH]."""
    rng = random.Random(seed)
    picked = [rng.choice(strings) for _ in range(count)]
    return picked, np.stack([render(string, rng) for string in picked])
