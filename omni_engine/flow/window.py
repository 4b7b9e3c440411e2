# SPDX-License-Identifier: Apache-2.0
"""Which denoising steps of an iteration are sampled with noise and trained on."""

from __future__ import annotations

from omni_engine.flow.noise import Stream, stream_key


def sde_window(seed: int, iteration: int, size: int, window_range: tuple[int, int]) -> tuple[int, ...]:
    """`size` consecutive step indices within [lo, hi), uniform over the possible starts.

    A function of (seed, iteration) alone, so every rank and a resumed run draw the same window.
    Raises ValueError unless 0 <= lo, 1 <= size <= hi - lo.
    """
    low, high = window_range
    if low < 0 or size < 1 or size > high - low:
        raise ValueError(
            f"no window of {size} steps within [{low}, {high}): it takes lo >= 0 and 1 <= --sde-window-size <= hi - lo"
        )
    start = low + stream_key(seed, iteration, 0, Stream.WINDOW) % (high - low - size + 1)
    return tuple(range(start, start + size))
