# SPDX-License-Identifier: Apache-2.0
"""Prompt sets and samplers. A leaf: imports nothing of the engine."""

from __future__ import annotations

from .prompts import PromptSampler, load_prompts

__all__ = ["PromptSampler", "load_prompts"]
