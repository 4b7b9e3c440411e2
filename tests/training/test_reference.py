# SPDX-License-Identifier: Apache-2.0
"""Invariant: the KL term is against the weights as loaded: exactly zero until they move, and above zero from then on;
the reference takes the policy's place for a forward pass and leaves it as it was, after an exception too.

Not covered: the gradient of the term (test_update.py), several processes (tests/distributed).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from omni_engine.arguments import AlgorithmSettings
from omni_engine.models.guidance import Guidance
from omni_engine.parallel import ParallelGroups
from omni_engine.training.reference import ReferenceWeights
from tests.engine_parts import Engine, Setup, build_engine

pytestmark = pytest.mark.fast
GUIDANCES = [Guidance(1.0, "both"), Guidance(3.0, "both"), Guidance(3.0, "conditional")]


@pytest.fixture
def build(folder: Path, single_process: ParallelGroups) -> Callable[[Guidance], Engine]:
    def build(guidance: Guidance = GUIDANCES[0]) -> Engine:
        algorithm = AlgorithmSettings(updates_per_rollout=1, kl_coef=0.1)
        return build_engine(folder, single_process, Setup(guidance=guidance, algorithm=algorithm))

    return build


@pytest.mark.parametrize("guidance", GUIDANCES, ids=["no guidance", "both branches", "conditional branch"])
def test_the_kl_is_exactly_zero_until_the_weights_move(build: Callable[[Guidance], Engine], guidance: Guidance) -> None:
    engine = build(guidance)
    first = engine.updater.run(engine.sample(0), engine.scored(0))
    second = engine.updater.run(engine.sample(1), engine.scored(1))
    third = engine.updater.run(engine.sample(2), engine.scored(2))
    assert first["policy/kl"] == 0.0
    assert 0.0 < second["policy/kl"] < third["policy/kl"]


def test_the_reference_is_the_model_as_loaded(build: Callable[..., Engine], folder: Path) -> None:
    engine, untouched = build(), build()
    for iteration in range(2):
        engine.updater.run(engine.sample(iteration), engine.scored(iteration))
    reference = engine.updater.reference
    assert reference is not None
    trained = engine.weights()
    with reference.in_place():
        assert all(torch.equal(value, untouched.weights()[name]) for name, value in engine.weights().items())
    assert all(torch.equal(value, trained[name]) for name, value in engine.weights().items())
    assert not all(torch.equal(value, untouched.weights()[name]) for name, value in trained.items())


def test_the_trained_weights_return_after_an_exception_in_their_own_storage() -> None:
    """The optimizer and the gradient buffers point at that storage."""
    layer = torch.nn.Linear(3, 2)
    reference = ReferenceWeights(dict(layer.named_parameters()))
    with torch.no_grad():
        layer.weight.add_(1.0)
    weight, storage = layer.weight.detach().clone(), layer.weight.data_ptr()
    with pytest.raises(KeyError), reference.in_place():
        assert torch.equal(layer.weight, reference.weights["weight"])
        raise KeyError("in the forward pass")
    assert torch.equal(layer.weight, weight) and layer.weight.data_ptr() == storage


def test_the_reference_is_a_copy() -> None:
    layer = torch.nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    reference = ReferenceWeights(dict(layer.named_parameters()))
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(reference.weights["weight"], before)
