# SPDX-License-Identifier: Apache-2.0
"""Moved to tools/bench/tiny_model.py, which tools may import too."""

from tools.bench.tiny_model import make_transformer, save_folder

__all__ = ["make_transformer", "save_folder"]
