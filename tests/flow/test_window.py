# SPDX-License-Identifier: Apache-2.0
"""Invariant: the window is a function of (seed, iteration), consecutive, inside its range, and uniform over it."""

from __future__ import annotations

from collections import Counter

import pytest

from omni_engine.flow import sde_window

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("size", "window_range"), [(2, (0, 5)), (1, (3, 4)), (5, (0, 5)), (3, (2, 10))])
def test_windows_are_consecutive_and_cover_the_range_evenly(size: int, window_range: tuple[int, int]) -> None:
    low, high = window_range
    draws = 4000
    windows = [sde_window(3, iteration, size, window_range) for iteration in range(draws)]
    for window in windows:
        assert len(window) == size and low <= window[0] and window[-1] < high
        assert window == tuple(range(window[0], window[0] + size))
    starts = Counter(window[0] for window in windows)
    expected = draws / (high - low - size + 1)
    assert sorted(starts) == list(range(low, high - size + 1))
    assert all(abs(count - expected) < 5 * expected**0.5 for count in starts.values())


def test_same_on_every_call_and_other_for_another_seed() -> None:
    first = [sde_window(3, iteration, 2, (0, 5)) for iteration in range(50)]
    assert first == [sde_window(3, iteration, 2, (0, 5)) for iteration in range(50)]
    assert first != [sde_window(4, iteration, 2, (0, 5)) for iteration in range(50)]


@pytest.mark.parametrize(("size", "window_range"), [(0, (0, 5)), (6, (0, 5)), (2, (-1, 5)), (1, (5, 5)), (1, (5, 3))])
def test_impossible_windows_are_refused(size: int, window_range: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no window"):
        sde_window(0, 0, size, window_range)
