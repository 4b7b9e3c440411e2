# SPDX-License-Identifier: Apache-2.0
"""The reference policy of a KL term: the weights as loaded, held beside the trained ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ReferenceWeights:
    """A copy of a stage's weights that can take their place for a forward pass."""

    def __init__(self, stage: torch.nn.Module):
        self.stage = stage
        self.weights = {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run the block with the reference weights; the trained ones return afterwards, whatever happens."""
        trained = {name: parameter.data for name, parameter in self.stage.named_parameters()}
        try:
            for name, parameter in self.stage.named_parameters():
                parameter.data = self.weights[name]
            yield
        finally:
            for name, parameter in self.stage.named_parameters():
                parameter.data = trained[name]
