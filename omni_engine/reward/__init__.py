# SPDX-License-Identifier: Apache-2.0
"""Scores pictures in processes of their own, while the rest of the rollout goes on.

`RewardPool` is the face: `submit(images, prompts)` gives a handle at once, `handle.result()` one `Reward` a sample.
Only numpy arrays come in here: nothing in this folder imports torch, so that a worker process starts in a second.
"""

from __future__ import annotations

from .base import SCORERS, Failure, Reward, RewardError, Score, Scorer, prompt_check
from .pool import RewardHandle, RewardPool

__all__ = [
    "SCORERS",
    "Failure",
    "Reward",
    "RewardError",
    "RewardHandle",
    "RewardPool",
    "Score",
    "Scorer",
    "prompt_check",
]
