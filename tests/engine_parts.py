# SPDX-License-Identifier: Apache-2.0
"""Moved to tools/bench/tiny_engine.py, which tools may import too."""

from tools.bench.tiny_engine import (
    PIXELS,
    TEXT_DIM,
    Engine,
    Setup,
    ToyComponents,
    build_engine,
    make_folder,
    with_segment,
)

__all__ = ["PIXELS", "TEXT_DIM", "Engine", "Setup", "ToyComponents", "build_engine", "make_folder", "with_segment"]
