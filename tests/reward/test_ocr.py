# SPDX-License-Identifier: Apache-2.0
"""Invariant: both readers read what is written, whatever the size and the neighbours of a picture, on the path that its
height selects: lines straight by the recogniser, scenes by detector and recogniser. Their rewards follow from what they
read. Pictures are rendered with Pillow's built-in font.

Not covered: how well they read hand-made scenes; the speed (tools measure it).
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from omni_engine.arguments import RewardSettings
from omni_engine.reward import Failure, RewardError, RewardPool, Score
from omni_engine.reward.ocr import BATCH, Ocr, OcrV4, greedy_ctc


def line(text: str, height: int = 16, width: int = 32, ink: int = 20, paper: int = 230) -> np.ndarray:
    """uint8 RGB [height, width, 3]: dark text in the middle of light paper, drawn at four times the size."""
    picture = Image.new("L", (4 * width, 4 * height), paper)
    font = ImageFont.load_default(size=3 * height)
    left, top, right, bottom = font.getbbox(text)
    at = ((4 * width - left - right) / 2, (4 * height - top - bottom) / 2)
    ImageDraw.Draw(picture).text(at, text, fill=ink, font=font)
    small = np.asarray(picture.resize((width, height), Image.Resampling.BOX))
    return np.repeat(small[:, :, None], 3, axis=2)


def scene(lower: str = "OPEN") -> np.ndarray:
    """uint8 RGB [256, 256, 3] with yellow words on blue at the top and white ones at the bottom."""
    picture = Image.new("RGB", (256, 256), (20, 60, 120))
    draw = ImageDraw.Draw(picture)
    draw.text((20, 30), "Spring Sale", font=ImageFont.load_default(size=36), fill=(255, 220, 0))
    draw.text((130, 190), lower, font=ImageFont.load_default(size=32), fill=(255, 255, 255))
    return np.asarray(picture)


@pytest.fixture(scope="module", params=[Ocr, OcrV4])
def reader(request: pytest.FixtureRequest) -> Ocr:
    scorer: Ocr = request.param()
    return scorer


@pytest.mark.fast
def test_lines_of_any_size_are_read_in_order(reader: Ocr) -> None:
    draw = random.Random(3)
    digits = [f"{draw.randrange(1000):03d}" for _ in range(BATCH + 3)]
    pictures = [line(text) for text in digits]
    pictures.insert(2, line("42", 48, 64))
    pictures.insert(5, line("Harbour 1907", 96, 620))
    expected = [*digits[:2], "42", *digits[2:4], "Harbour 1907", *digits[4:]]
    assert [text.replace(" ", "") for text in reader.read(pictures)] == [text.replace(" ", "") for text in expected]


@pytest.mark.fast
def test_rewards_follow_from_what_was_read(reader: Ocr) -> None:
    prompts = ['the number "123"', 'the number "129"', "no number"]
    right, near, broken = reader.score([line("123")] * 3, prompts)
    assert right == Score(1.0, "123") and near == Score(1 - 1 / 3, "123")
    assert isinstance(broken, Failure) and "this prompt has none" in broken.reason
    blank = np.full((16, 32, 3), 255, dtype=np.uint8)
    assert reader.score([blank], prompts[:1]) == [Score(0.0, "")]


@pytest.mark.fast
@pytest.mark.parametrize("size", [(1, 1), (96, 1), (3, 40)])
def test_a_picture_of_an_odd_size_is_no_error(reader: Ocr, size: tuple[int, int]) -> None:
    assert len(reader.read([np.full((*size, 3), 255, dtype=np.uint8)])) == 1


def test_scenes_are_read_from_top_to_bottom(reader: Ocr) -> None:
    blank = np.full((256, 256, 3), 255, dtype=np.uint8)
    assert reader.read([scene(), blank, scene("closed")]) == ["Spring Sale OPEN", "", "Spring Sale closed"]


@pytest.mark.fast
def test_a_package_or_a_model_that_is_missing_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ocr, "detector", "gone.onnx")
    with pytest.raises(RewardError, match=r"gone.onnx is missing.* pip install 'rapidocr>=3.10' onnxruntime"):
        Ocr()
    monkeypatch.setattr(OcrV4, "package", "no_such_package")
    with pytest.raises(RewardError, match="needs the packages no_such_package and onnxruntime: pip install"):
        OcrV4()


@pytest.mark.fast
def test_the_pool_scores_with_one_and_watches_with_the_other() -> None:
    pictures, prompts = np.stack([line("123"), line("777")]), ['"123"', '"770"']
    with RewardPool(["ocr"], [1.0], RewardSettings(), watchers=["ocr_v4"], picture_size=(16, 32)) as pool:
        rewards = pool.submit(pictures, prompts, watch=True).result()
    assert [reward.value for reward in rewards] == [1.0, 1 - 1 / 3]
    assert [reward.texts for reward in rewards] == [{"ocr": text, "ocr_v4": text} for text in ("123", "777")]


@pytest.mark.fast
def test_channels_reach_the_readers_in_the_order_blue_green_red(monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_engine.reward import ocr

    red = np.zeros((48, 96, 3), dtype=np.uint8)
    red[:, :, 0] = 255
    planes = ocr._as_input([red], 96)
    assert planes.dtype == np.float32 and planes.shape == (1, 3, 48, 96)
    assert planes[0, :, 0, 0].tolist() == [-1.0, -1.0, 1.0]
    scorer = Ocr()
    seen: list[np.ndarray] = []
    monkeypatch.setitem(vars(scorer), "_read_scene", lambda picture: seen.append(picture) or "")
    scorer.read([np.repeat(red, 3, axis=0)])
    assert seen[0][0, 0].tolist() == [0, 0, 255]


@pytest.mark.fast
def test_repeats_collapse_unless_a_blank_parts_them() -> None:
    best = np.array([[1, 1, 0, 1, 2, 2, 3], [0, 0, 0, 0, 0, 0, 0], [0, 2, 0, 0, 2, 1, 0]])
    assert greedy_ctc(best, ["", "a", "b", " "]) == ["aab ", "", "bba"]


@pytest.mark.fast
def test_the_files_named_are_in_the_wheels_themselves(reader: Ocr) -> None:
    assert all((Path(reader._models) / file).stat().st_size > 1e6 for file in (reader.recogniser, reader.detector))
