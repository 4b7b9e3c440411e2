# SPDX-License-Identifier: Apache-2.0
"""The reference policy of a KL term: the weights as loaded, held beside the trained ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


class ReferenceWeights:
    """A copy of a rank's weights that can take their place for a forward pass."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]):
        self.parameters = parameters
        self.weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run the block with the reference weights; the trained ones return afterwards, whatever happens."""
        trained = {name: parameter.data for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = self.weights[name]
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = trained[name]
