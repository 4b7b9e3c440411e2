# SPDX-License-Identifier: Apache-2.0
"""Which model a run started from, told from its folder without reading all of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

SAMPLE_BYTES = 2**16


def model_fingerprint(folder: str | Path) -> str:
    """SHA-256 over a pipeline folder: its JSON files whole; of each safetensors file the size, the beginning (where its
    table of names and shapes stands), the middle and the end.

    Trained weights differ everywhere, so samples tell two bases apart, and a folder of 40 GB costs a few reads. Where
    the folder lies makes no difference.
    """
    folder = Path(folder)
    digest = hashlib.sha256()
    for file in sorted([*folder.rglob("*.json"), *folder.rglob("*.safetensors")]):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder).as_posix()} {size}\n".encode())
        with file.open("rb") as content:
            if file.suffix == ".json":
                digest.update(content.read())
                continue
            for start in (0, size // 2, max(size - SAMPLE_BYTES, 0)):
                content.seek(start)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()
