# SPDX-License-Identifier: Apache-2.0
"""A progress bar for someone who watches, and lines of text that do not break it."""

from __future__ import annotations

import sys

from tqdm import tqdm


class Progress:
    """Prints lines to standard output and, if asked for, keeps a bar below them on standard error.

    `enabled` None shows the bar on a terminal only: in a log file it would be noise.
    """

    def __init__(self, enabled: bool | None = None) -> None:
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._bar: tqdm | None = None

    def start(self, iteration: int, total_iterations: int) -> None:
        """Show the bar, with `iteration` iterations done. Nothing happens if it is shown already."""
        if self._enabled and self._bar is None:
            self._bar = tqdm(
                total=total_iterations, initial=iteration, file=sys.stderr, unit="iteration", dynamic_ncols=True
            )

    def print(self, line: str) -> None:
        """Print the line above the bar, at once."""
        if self._bar is not None:
            tqdm.write(line, file=sys.stdout)
        else:
            print(line)
        sys.stdout.flush()

    def phase(self, name: str) -> None:
        """Say what is going on within the iteration."""
        if self._bar is not None:
            self._bar.set_description(name.replace("_", " "))

    def advance(self, iteration: int, reward: float | None) -> None:
        """Move the bar to `iteration` iterations done."""
        if self._bar is None:
            return
        if reward is not None:
            self._bar.set_postfix(reward=f"{reward:.4f}", refresh=False)
        self._bar.update(iteration - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
