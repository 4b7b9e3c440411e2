# SPDX-License-Identifier: Apache-2.0
"""Invariant: the average is that of its formula over the trained weights of every so many steps; while it stands in for
them nothing of the training is touched, so that training goes on with the bits it would have had.

Not covered: saving and resharding it (tests/checkpoint, tests/distributed).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omni_engine.arguments import LoraSettings, ParallelSettings
from omni_engine.parallel import ParallelGroups
from omni_engine.training.average import WeightAverage
from tests.small_training import build_trainee
from tests.tiny import make_transformer, save_folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(make_transformer(layers=1), tmp_path_factory.mktemp("average"))


@pytest.mark.fast
def test_the_average_follows_its_formula(small: Path, single_process: ParallelGroups) -> None:
    trainee = build_trainee(small, single_process)
    trainee.optimizer.keep_average(decay=0.3, interval=2)
    average = trainee.optimizer.average
    assert average is not None
    expected = {name: trainee.weights()[name] for name in trainee.policy.trained_parameters()}
    # n / (9 + n): 2/11, 4/13 (more than 0.3), and so on.
    for version, decay in ((1, None), (2, 2 / 11), (3, None), (4, 0.3), (5, None), (6, 0.3)):
        trainee.train(version)
        if decay is not None:
            weights = trainee.weights()
            expected = {name: decay * value + (1 - decay) * weights[name] for name, value in expected.items()}
        for name, value in average.weights.items():
            torch.testing.assert_close(value, expected[name])
    assert set(average.weights) == set(expected)


LORA = LoraSettings(lora_rank=2)


@pytest.mark.parametrize(
    ("lora", "bf16", "distributed"),
    [
        (None, False, False),
        (None, True, True),
        (LORA, False, False),
        pytest.param(LORA, True, True, marks=pytest.mark.fast),
    ],
)
def test_standing_in_for_the_weights_leaves_training_as_it_was(
    lora: LoraSettings | None, bf16: bool, distributed: bool, small: Path, single_process: ParallelGroups
) -> None:
    parallel = ParallelSettings(use_distributed_optimizer=distributed)
    undisturbed, disturbed = (
        build_trainee(small, single_process, parallel, bf16=bf16, lora=lora, ema_decay=0.9) for _ in range(2)
    )
    average = disturbed.optimizer.average
    assert average is not None
    for seed in range(3):
        undisturbed.train(seed)
        disturbed.train(seed)
        trained = disturbed.weights()
        places = {name: parameter.data_ptr() for name, parameter in disturbed.policy.parameters().items()}
        with pytest.raises(KeyError), average.in_place():
            now = disturbed.weights()
            for name, value in average.weights.items():
                assert value.dtype == torch.float32 and torch.equal(now[name], value.to(now[name].dtype))
            # The first step has a learning rate of zero.
            assert any(not torch.equal(now[name], trained[name]) for name in average.weights) == (seed > 0)
            raise KeyError("in the evaluation")
        assert places == {name: parameter.data_ptr() for name, parameter in disturbed.policy.parameters().items()}
    for name, value in undisturbed.weights().items():
        assert torch.equal(disturbed.weights()[name], value), name
        assert lora is None or name in average.weights or torch.equal(value, trained[name])


@pytest.mark.fast
def test_an_average_of_16_bit_weights_keeps_what_they_cannot_hold() -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    average = WeightAverage({"w": weight}, decay=0.9, interval=1)
    weight.data += 2**-7  # the next bf16 number
    average.update(1000)
    torch.testing.assert_close(average.weights["w"], torch.full((3,), 1 + 0.1 * 2**-7))
