# SPDX-License-Identifier: Apache-2.0
"""A grid shows the pixels of tiny pictures as they are, and every picture that it has room for.

Does not cover how the captions look.
"""

from __future__ import annotations

import numpy as np
import pytest

from omni_engine.training.logging.pictures import MAX_PICTURES, picture_grid

pytestmark = pytest.mark.fast


def test_tiny_pictures_are_enlarged_by_a_whole_number_without_smoothing() -> None:
    image = np.random.default_rng(0).integers(0, 256, (1, 16, 32, 3), dtype=np.uint8)
    grid = picture_grid(image, ["a prompt"], "title")
    enlarged = image[0].repeat(6, axis=0).repeat(6, axis=1)
    found = [
        (top, left)
        for top in range(grid.shape[0] - 95)
        for left in range(grid.shape[1] - 191)
        if np.array_equal(grid[top : top + 96, left : left + 192], enlarged)
    ]
    assert len(found) == 1


@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (3, 16, 32, 3), (7, 600, 200, 3), (MAX_PICTURES + 9, 8, 8, 3)])
def test_grids_of_any_size_are_drawn(shape: tuple[int, ...]) -> None:
    prompts = ["", "one\nline", "很长的提示" * 40, "x" * 300, "many words " * 40] * shape[0]
    images = np.zeros(shape, np.uint8)
    grid = picture_grid(images, prompts[: shape[0]], "a title that is far too long " * 20)
    assert grid.dtype == np.uint8 and grid.shape[2] == 3
    # Only pictures are pure black: the ink of the captions is not.
    of_one = (picture_grid(images[:1], ["a"], "title") == 0).all(axis=2).sum()
    assert (grid == 0).all(axis=2).sum() == min(shape[0], MAX_PICTURES) * of_one > 0


@pytest.mark.parametrize(
    ("images", "prompts"),
    [
        (np.zeros((2, 4, 4, 3), np.float32), ["a", "b"]),
        (np.zeros((2, 3, 4, 4), np.uint8), ["a", "b"]),
        (np.zeros((2, 4, 4, 3), np.uint8), ["a"]),
        (np.zeros((0, 4, 4, 3), np.uint8), []),
    ],
)
def test_what_are_not_pictures_with_prompts_is_refused(images: np.ndarray, prompts: list[str]) -> None:
    with pytest.raises(ValueError, match="pictures"):
        picture_grid(images, prompts, "title")
