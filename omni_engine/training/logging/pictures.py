# SPDX-License-Identifier: Apache-2.0
"""A grid of pictures, each above a strip with its prompt, that one can read whatever the size of the pictures."""

from __future__ import annotations

import io
import math
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from omni_engine.training.logging.files import write_bytes

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
_TILE = 192  # pixels: tiny pictures grow until their longer side would pass this
_LARGEST = 384  # pixels: longer sides are shrunk to this
_COLUMNS = 6
_GAP = 12
_LINE = 15
_HEADER = 34
_BACKGROUND = (255, 255, 255)
_FRAME = (208, 208, 208)
_INK = (32, 32, 32)
_FIRST_CJK = "\u2e80"
_CJK_FONTS = ("NotoSansCJK-Regular.ttc", "SourceHanSansSC-Regular.otf", "wqy-microhei.ttc", "msyh.ttc", "PingFang.ttc")

MAX_PICTURES = 24
"""How many pictures a grid shows."""


def picture_grid(
    images: npt.NDArray[np.uint8], prompts: Sequence[str], title: str, captions: Sequence[str] | None = None
) -> npt.NDArray[np.uint8]:
    """Draw the first `MAX_PICTURES` pictures as a grid.

    `images` uint8 [n, height, width, 3] with n prompts; `captions` stand under the pictures instead of the prompts.
    Tiny pictures are enlarged by a whole number without smoothing, so that each of their pixels stays visible; large
    ones are shrunk. Returns uint8 [height, width, 3]. Raises `ValueError` for any other shape, dtype or count.
    """
    _check(images, prompts, captions)
    shown = [_resized(Image.fromarray(image)) for image in images[:MAX_PICTURES]]
    width, height = shown[0].size
    title_font, font = ImageFont.load_default(size=16), _font_for(captions or prompts, size=12)
    texts = [_wrapped(text, width, font) for text in (captions or prompts)[: len(shown)]]
    strip = 5 + _LINE * max(len(lines) for lines in texts)
    columns = min(_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    cell_width, cell_height = width + _GAP, height + strip + _GAP
    canvas = Image.new("RGB", (_GAP + columns * cell_width, _HEADER + _GAP + rows * cell_height), _BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    draw.text((_GAP, _GAP), _fitted(title, canvas.width - 2 * _GAP, title_font), fill=_INK, font=title_font)
    for number, (picture, lines) in enumerate(zip(shown, texts, strict=True)):
        left = _GAP + number % columns * cell_width
        top = _HEADER + _GAP + number // columns * cell_height
        draw.rectangle((left - 1, top - 1, left + width, top + height), outline=_FRAME)
        canvas.paste(picture, (left, top))
        for row, line in enumerate(lines):
            draw.text((left, top + height + 3 + row * _LINE), line, fill=_INK, font=font)
    return np.asarray(canvas)


def write_png(path: Path, picture: npt.NDArray[np.uint8]) -> None:
    """Replace the file by the picture, uint8 [height, width, 3]. Raises `LoggingError`."""
    content = io.BytesIO()
    Image.fromarray(picture).save(content, format="PNG")
    write_bytes(path, content.getvalue())


def _check(images: npt.NDArray[np.uint8], prompts: Sequence[str], captions: Sequence[str] | None) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or 0 in images.shape:
        raise ValueError(f"expected pictures as uint8 [n, height, width, 3], got {images.dtype} {list(images.shape)}")
    for name, texts in (("prompts", prompts), ("captions", captions)):
        if texts is not None and len(texts) != len(images):
            raise ValueError(f"{len(images)} pictures came with {len(texts)} {name}")


def _resized(picture: Image.Image) -> Image.Image:
    longest = max(picture.size)
    if longest > _LARGEST:
        width, height = (max(1, round(side * _LARGEST / longest)) for side in picture.size)
        return picture.resize((width, height), Image.Resampling.LANCZOS)
    factor = max(1, _TILE // longest)
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _font_for(texts: Sequence[str], size: int) -> _Font:
    """Pillow's own font, or for Chinese, Japanese and Korean, which it lacks, the first font found that has them.

    Where no such font is installed those characters show as boxes.
    """
    if any(character >= _FIRST_CJK for text in texts for character in text):
        for name in _CJK_FONTS:
            with suppress(OSError):
                return ImageFont.truetype(name, size)
    return ImageFont.load_default(size=size)


def _wrapped(text: str, width: int, font: _Font) -> list[str]:
    """The text on one line or two, the end of the second cut if it is wider than `width` pixels."""
    first, rest = "", text.split()
    while rest and font.getlength(f"{first} {rest[0]}".strip()) <= width:
        first = f"{first} {rest.pop(0)}".strip()
    if not first:
        return [_fitted(text, width, font)]
    return [first, _fitted(" ".join(rest), width, font)] if rest else [first]


def _fitted(text: str, width: int, font: _Font) -> str:
    """The text on one line, its end cut if it is wider than `width` pixels."""
    line = " ".join(text.split())
    if font.getlength(line) <= width:
        return line
    # The longest start that fits, by halving: prompts may have thousands of characters.
    fitting = bisect_right(range(len(line) + 1), float(width), key=lambda length: font.getlength(line[:length] + "..."))
    return line[: max(0, fitting - 1)] + "..."
