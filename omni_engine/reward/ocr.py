# SPDX-License-Identifier: Apache-2.0
"""Rewards a picture for showing the text that its prompt asks for, read by PP-OCR models that two wheels carry inside.

What reads a picture is chosen by its height alone, since all pictures of a run have one size:

- up to `MAX_LINE_HEIGHT` pixels it is taken for one line of text and goes straight to the recogniser, scaled to the
  height that the recogniser was trained on, at any width. A detector finds nothing in pictures that small.
- above that it is a scene: the package's own pipeline finds the text boxes and reads them, top to bottom and left to
  right, and the pieces are joined by blanks. Boxes read with a confidence below 0.5 are dropped, the packages' default.

Nothing readable is an honest 0.0. Both models are greedy CTC readers of one thread.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np

from .base import Failure, RewardError, Score
from .text import ocr_reward, target_text

MAX_LINE_HEIGHT = 96
"""Pixels."""
LINE_HEIGHT = 48
"""Pixels: what the recognisers were trained on."""
MIN_LINE_WIDTH = 16
"""Pixels after scaling."""
BATCH = 16


class Ocr:
    """PP-OCRv6 (small), from inside the wheel of `rapidocr`."""

    name = "ocr"
    package = "rapidocr"
    requirement = "rapidocr>=3.10"
    recogniser = "PP-OCRv6_rec_small.onnx"
    detector = "PP-OCRv6_det_small.onnx"

    def __init__(self) -> None:
        spec = importlib.util.find_spec(self.package)
        remedy = f"pip install '{self.requirement}' onnxruntime"
        if spec is None or spec.origin is None or importlib.util.find_spec("onnxruntime") is None:
            raise RewardError(f"reward {self.name!r} needs the packages {self.package} and onnxruntime: {remedy}")
        self._models = Path(spec.origin).parent / "models"
        for file in (self.recogniser, self.detector):
            if not (self._models / file).is_file():  # the package would try to download it in the middle of a run
                raise RewardError(
                    f"reward {self.name!r}: {self._models / file} is missing; another version of {self.package} is "
                    f"installed, or its folder is damaged: {remedy} --force-reinstall"
                )

    @staticmethod
    def check_prompt(prompt: str) -> None:
        """Raises ValueError if the prompt does not name the text to show."""
        target_text(prompt)

    def score(self, images: list[np.ndarray], prompts: list[str]) -> list[Score | Failure]:
        """`ocr_reward` of each of the uint8 RGB pictures [H, W, 3], with the text that was read."""
        return [_judged(read, prompt) for read, prompt in zip(self.read(images), prompts, strict=True)]

    def read(self, images: list[np.ndarray]) -> list[str]:
        """The text in each of the uint8 RGB pictures [H, W, 3]; "" where there is none."""
        texts = [""] * len(images)
        by_width: dict[int, list[int]] = {}
        for i, image in enumerate(images):
            if image.shape[0] > MAX_LINE_HEIGHT:
                texts[i] = self._read_scene(np.ascontiguousarray(image[:, :, ::-1]))
            else:
                by_width.setdefault(line_width(image), []).append(i)
        for width, members in by_width.items():
            for start in range(0, len(members), BATCH):
                batch = members[start : start + BATCH]
                for i, text in zip(batch, self._lines.read([images[i] for i in batch], width), strict=True):
                    texts[i] = text
        return texts

    # Loaded when first needed: a run has either lines or scenes, and each pipeline holds some 100 MB.

    @cached_property
    def _lines(self) -> LineReader:
        return LineReader(self._models / self.recogniser)

    @cached_property
    def _read_scene(self) -> Callable[[np.ndarray], str]:
        from rapidocr import RapidOCR

        threads = "EngineConfig.onnxruntime.intra_op_num_threads"
        engine = RapidOCR(params={"Global.use_cls": False, "Global.log_level": "error", threads: 1})

        def read(bgr: np.ndarray) -> str:
            return " ".join(getattr(engine(bgr), "txts", None) or ())

        return read


class OcrV4(Ocr):
    """PP-OCRv4, from inside the wheel of `rapidocr-onnxruntime`: an older reader to watch evaluations with.

    A gain that the rewarded reader sees and this one does not is a gain by fooling the reader.
    """

    name = "ocr_v4"
    package = "rapidocr_onnxruntime"
    requirement = "rapidocr-onnxruntime>=1.4.4"
    recogniser = "ch_PP-OCRv4_rec_infer.onnx"
    detector = "ch_PP-OCRv4_det_infer.onnx"

    @cached_property
    def _read_scene(self) -> Callable[[np.ndarray], str]:
        from rapidocr_onnxruntime import RapidOCR

        engine = RapidOCR(intra_op_num_threads=1)

        def read(bgr: np.ndarray) -> str:
            pieces, _ = engine(bgr, use_cls=False)
            return " ".join(text for _, text, _ in pieces or ())

        return read


class LineReader:
    """A PP-OCR recogniser: one line of text a picture, decoded by greedy CTC."""

    def __init__(self, model: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # the pool runs several processes instead
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        characters = self._session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self._characters = ["", *characters, " "]  # class 0 is CTC's blank, the last one the space

    def read(self, images: list[np.ndarray], width: int) -> list[str]:
        """Texts of the uint8 RGB pictures [H, W, 3], all scaled to `width` pixels."""
        (probabilities,) = self._session.run(None, {self._input: _as_input(images, width)})
        return greedy_ctc(probabilities.argmax(-1), self._characters)


def greedy_ctc(best: np.ndarray, characters: list[str]) -> list[str]:
    """Texts of the best classes [N, positions]: a repeated class counts once, unless blanks (class 0) part it."""
    changed = np.diff(best, axis=1, prepend=-1) != 0
    return ["".join(characters[k] for k in row[keep]) for row, keep in zip(best, changed, strict=True)]


def line_width(image: np.ndarray) -> int:
    """Width in pixels, in proportion, of a picture [H, W, 3] scaled to `LINE_HEIGHT`."""
    return max(MIN_LINE_WIDTH, image.shape[1] * LINE_HEIGHT // image.shape[0])


def _as_input(images: list[np.ndarray], width: int) -> np.ndarray:
    """float32 [N, 3, LINE_HEIGHT, width] in [-1, 1], channels in the order blue, green, red, as PP-OCR was trained."""
    from PIL import Image

    scaled = np.empty((len(images), LINE_HEIGHT, width, 3), dtype=np.uint8)
    for out, image in zip(scaled, images, strict=True):
        out[:] = np.asarray(Image.fromarray(image).resize((width, LINE_HEIGHT), Image.Resampling.BILINEAR))
    planes = np.ascontiguousarray(scaled[..., ::-1].transpose(0, 3, 1, 2))
    return planes / np.float32(127.5) - np.float32(1)


def _judged(read: str, prompt: str) -> Score | Failure:
    try:
        return Score(ocr_reward(read, target_text(prompt)), read)
    except ValueError as error:
        return Failure(str(error))
