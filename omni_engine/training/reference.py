# SPDX-License-Identifier: Apache-2.0
"""The reference policy of a KL term: the weights as loaded, held beside the trained ones or under the adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from omni_engine.models.policy import Policy
from omni_engine.parallel import without_adapters


class Reference(Protocol):
    """The reference policy."""

    def in_place(self) -> AbstractContextManager[None]:
        """Run the block with the reference in the policy's place; the policy returns afterwards, whatever happens."""
        ...


class ReferenceWeights:
    """A copy of a rank's weights that can take their place for a forward pass."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]):
        self.parameters = parameters
        self.weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run the block with the reference weights; the trained ones return afterwards, whatever happens."""
        with swapped(self.parameters, self.weights):
            yield


class FrozenBase:
    """The model under the adapters of a LoRA run, which are left out for the pass. Nothing is copied."""

    def __init__(self, policy: Policy):
        self.policy = policy

    def in_place(self) -> AbstractContextManager[None]:
        return without_adapters(self.policy.chunks)


def reference_of(policy: Policy) -> Reference:
    """The policy as it is now, before it trains."""
    return ReferenceWeights(policy.parameters()) if policy.lora is None else FrozenBase(policy)


@contextmanager
def swapped(parameters: Mapping[str, torch.nn.Parameter], others: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Run the block with other values; the parameters' own storage is not touched and returns, whatever happens.

    The optimizer and the gradient buffers point at that storage, so nothing of theirs changes.
    """
    own = {name: parameters[name].data for name in others}
    try:
        for name, value in others.items():
            parameters[name].data = value
        yield
    finally:
        for name, value in own.items():
            parameters[name].data = value
