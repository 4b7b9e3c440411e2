# SPDX-License-Identifier: Apache-2.0
"""Invariant: every evaluation samples the same prompts from the same noise by plain ODE steps; a prompt that cannot be
scored is left out of the means and counted; none scored stops the run.

Not covered: real scorers and pictures (tests/integration), several replicas.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from omni_engine.arguments import DataSettings, OptimizerSettings
from omni_engine.models.guidance import Guidance
from omni_engine.parallel import ParallelGroups
from omni_engine.reward import Reward, RewardPool
from omni_engine.training.evaluation import Evaluation, Evaluator
from omni_engine.training.optimizer import TrainingError
from tests.engine_parts import PIXELS, Engine, Setup, ToyComponents, build_engine

pytestmark = pytest.mark.fast
PROMPTS = ["one", "two", "three", "four", "five"]


class Stamps(ToyComponents):
    """Paints the mean of the final latent, so that pictures tell of their noise."""

    def decode(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        values = (latents.mean(dim=(1, 2)) * 200 + 100).clamp(0, 254).to(torch.uint8)
        return values.view(-1, 1, 1, 1).expand(-1, height, width, 3).contiguous()


class Pool:
    """Scores a prompt by its length, and by its square for watching only; refuses some."""

    weighted = ("length",)

    def __init__(self, refused: tuple[str, ...] = ()) -> None:
        self.refused = refused

    def submit(self, images: np.ndarray, prompts: list[str], watch: bool = False) -> Pool:
        assert watch, "an evaluation asks the watching scorers, too"
        self.prompts = prompts
        return self

    def result(self) -> list[Reward]:
        return [
            Reward(None, failure="refused")
            if prompt in self.refused
            else Reward(
                value=float(len(prompt)),
                parts={"length": float(len(prompt)), "square": float(len(prompt) ** 2)},
                texts={"length": prompt.upper(), "square": ""},
            )
            for prompt in self.prompts
        ]


@pytest.fixture(scope="module")
def engine(folder: Path, single_process: ParallelGroups) -> Engine:
    engine = build_engine(folder, single_process, Setup(optimizer=OptimizerSettings(lr=1e-2, micro_batch_size=2)))
    engine.rollout.components = Stamps()
    return engine


def evaluate(engine: Engine, *refused: str, prompts: list[str] = PROMPTS, size: int = 5) -> Evaluation:
    pool = cast("RewardPool", Pool(refused))
    settings, guidance = DataSettings(train_prompts="-"), Guidance(1.0, "both")
    evaluator = Evaluator(engine.rollout, pool, prompts, engine.schedule, guidance, settings, size, engine.groups)
    return evaluator.run()


def test_an_evaluation_repeats_itself_and_sees_the_weights_move(engine: Engine) -> None:
    first, again = evaluate(engine), evaluate(engine, size=2)
    assert first.images.shape == (5, *PIXELS, 3) and first.images.dtype == np.uint8
    assert len({int(image[0, 0, 0]) for image in first.images}) > 1, "each prompt has noise of its own"
    assert np.abs(first.images.astype(int) - again.images).max() <= 1, "another batch rounds otherwise"
    engine.updater.run(engine.sample(), engine.scored())
    assert np.abs(evaluate(engine).images.astype(int) - first.images).max() > 1


def test_a_failed_prompt_is_left_out_and_counted(engine: Engine) -> None:
    result = evaluate(engine, "three", "four")
    assert result.failed == 2 and result.prompts == PROMPTS
    # The one weighted scorer is the reward, so it is not told twice.
    assert result.rewards == pytest.approx({"reward": (3 + 3 + 4) / 3, "square": (9 + 9 + 16) / 3})
    assert result.captions[0] == "one -> ONE" and result.captions[2] == "three -> ?"


def test_an_evaluation_without_a_reward_stops_the_run(engine: Engine) -> None:
    with pytest.raises(TrainingError, match="the last reason was: refused"):
        evaluate(engine, *PROMPTS)
