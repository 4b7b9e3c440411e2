"""Reads pictures of one line of text with a PP-OCR recogniser from inside a wheel, without its detector."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image
from rapidfuzz.distance import Levenshtein

LINE_HEIGHT = 48  # pixels: what the recognisers were trained on
BATCH = 16
MODELS = {  # name -> (package, file in its models folder)
    "PP-OCRv6": ("rapidocr", "PP-OCRv6_rec_small.onnx"),
    "PP-OCRv4": ("rapidocr_onnxruntime", "ch_PP-OCRv4_rec_infer.onnx"),
}


def text_reward(read: str, target: str) -> float:
    """1 - edits / length of the target; 1 when the read text contains the target. Case and blanks do not count."""
    read, target = ("".join(text.split()).lower() for text in (read, target))
    edits = 0 if target in read else min(Levenshtein.distance(read, target), len(target))
    return 1.0 - edits / len(target)


class Recogniser:
    """Greedy CTC reading by one of MODELS."""

    def __init__(self, name: str, threads: int) -> None:
        package, file = MODELS[name]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"{name} comes inside the wheel of {package}: pip install {package}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
        path = Path(spec.origin).parent / "models" / file
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        characters = self._session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self._characters = ["", *characters, " "]  # index 0 is the CTC blank

    def read(self, pictures: np.ndarray) -> list[str]:
        """Read uint8 pictures [N, H, W, 3]."""
        lines = np.stack([self._as_line(picture) for picture in pictures])
        return [text for i in range(0, len(lines), BATCH) for text in self._read_batch(lines[i : i + BATCH])]

    def rewards(self, pictures: np.ndarray, targets: list[str]) -> np.ndarray:
        """float64 [N]: `text_reward` of each of the uint8 pictures [N, H, W, 3]."""
        return np.array([text_reward(read, target) for read, target in zip(self.read(pictures), targets, strict=True)])

    @staticmethod
    def _as_line(picture: np.ndarray) -> np.ndarray:
        width = int(picture.shape[1] * LINE_HEIGHT / picture.shape[0])
        line = Image.fromarray(picture).resize((width, LINE_HEIGHT), Image.Resampling.BILINEAR)
        return np.asarray(line, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1  # [3, LINE_HEIGHT, width]

    def _read_batch(self, lines: np.ndarray) -> list[str]:
        (scores,) = self._session.run(None, {self._session.get_inputs()[0].name: lines})
        best = scores.argmax(-1)  # [N, positions]
        changed = np.diff(best, axis=1, prepend=-1) != 0  # a repeated index is one character, unless blanks part it
        return ["".join(self._characters[k] for k in row[keep]) for row, keep in zip(best, changed, strict=True)]
