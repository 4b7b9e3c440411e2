# SPDX-License-Identifier: Apache-2.0
"""An exponential moving average of the trained weights (EMA), kept on each rank beside its own part of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from omni_engine.training.reference import swapped


class WeightAverage:
    """A float32 average of a rank's trained weights, as the network holds them.

    Attributes:
        weights: the average by the parameters' paths.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], decay: float, interval: int):
        """Starts as the weights are. `interval`: optimizer steps between two updates of the average."""
        self.parameters, self.decay, self.interval = parameters, decay, interval
        self.weights = {path: parameter.detach().float().clone() for path, parameter in parameters.items()}

    def is_due(self, version: int) -> bool:
        """Whether the average takes part of the weights that `version` optimizer steps have made."""
        return version % self.interval == 0

    @torch.no_grad()
    def update(self, version: int) -> None:
        """Move the average towards the weights: average += (1 - decay) (weights - average).

        The decay is at most n / (9 + n) after n steps, as in flow_grpo (`EMAModuleWrapper.get_current_decay`), so that
        the first weights do not stay in an average of many.
        """
        decay = min(version / (9 + version), self.decay)
        for path, average in self.weights.items():
            average.lerp_(self.parameters[path].float(), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run the block with the average as the policy's weights, in their dtype; the trained ones return exactly."""
        cast = {path: average.to(self.parameters[path].dtype) for path, average in self.weights.items()}
        with swapped(self.parameters, cast):
            yield
