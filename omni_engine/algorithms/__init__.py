# SPDX-License-Identifier: Apache-2.0
"""Reinforcement-learning algorithms: from rewards to advantages, from decisions to a loss.

`build_algorithm` is the face; a new algorithm is a class in a file of its own and a line in ALGORITHMS.
"""

from __future__ import annotations

from collections.abc import Callable

from omni_engine.algorithms.base import Algorithm, DecisionStats, LossOutput, Needs
from omni_engine.algorithms.flow_grpo import FlowGRPO
from omni_engine.arguments.algorithm import AlgorithmSettings

ALGORITHMS: dict[str, Callable[[AlgorithmSettings], Algorithm]] = {"flow_grpo": FlowGRPO}


def build_algorithm(settings: AlgorithmSettings) -> Algorithm:
    """The algorithm named by `settings.algorithm`. Raises ValueError for an unknown name."""
    if settings.algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {settings.algorithm!r}: choose one of {', '.join(sorted(ALGORITHMS))}")
    return ALGORITHMS[settings.algorithm](settings)


__all__ = ["ALGORITHMS", "Algorithm", "DecisionStats", "LossOutput", "Needs", "build_algorithm"]
