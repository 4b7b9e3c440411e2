# SPDX-License-Identifier: Apache-2.0
"""A tiny policy that trains on made-up targets: optimizer steps without rollout and rewards.

Import `omni_engine` before megatron.core, as ever; this module does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

import omni_engine  # noqa: F401 - prepares megatron.core's import
from omni_engine.arguments import LoraSettings, ModelSettings, OptimizerSettings, ParallelSettings
from omni_engine.checkpoint import load_transformer
from omni_engine.models import DenoiserInput, TextCondition, build_family
from omni_engine.models.adapters import initialize_adapters
from omni_engine.models.policy import Policy
from omni_engine.parallel import ParallelGroups
from omni_engine.training.optimizer import PolicyOptimizer

# Adam's epsilon is of the size of the gradients: with a small one the first steps are the sign of the gradient, and
# where that is rounding noise (a key's bias) the sign is the layout's.
OPTIMIZER = OptimizerSettings(lr=1e-2, adam_eps=1e-4, weight_decay=0.01, clip_grad=0.5, lr_warmup_iters=3)
MICRO_BATCHES = 2
"""Of a step in all: one a replica under two of them."""


@dataclass
class Trainee:
    """A policy and its optimizer."""

    policy: Policy
    optimizer: PolicyOptimizer

    def train(self, *seeds: int) -> None:
        """One optimizer step a seed, on data that follow from it."""
        for seed in seeds:
            self._step(seed)

    def _step(self, seed: int) -> None:
        policy, generator = self.policy, torch.Generator().manual_seed(1000 + seed)
        channels, text_dim = policy.shape.channels, policy.family.config.joint_attention_dim  # type: ignore[attr-defined]
        inputs, targets = [], []
        for _ in range(MICRO_BATCHES):
            latents, target = torch.randn(2, 2, policy.shape.tokens, channels, generator=generator)
            rows = [torch.randn(length, text_dim, generator=generator) for length in (3, 5)]
            time = torch.rand(2, generator=generator)
            inputs.append(DenoiserInput({"image": latents}, time, TextCondition.collate(rows, 5), policy.shape.grid))
            targets.append(target)
        mine = slice(policy.groups.dp_rank, None, policy.groups.dp_size)
        inputs, targets = inputs[mine], targets[mine]
        self.optimizer.zero_grad()
        policy.train(inputs, lambda index, output: ((output - targets[index]).square().mean() / MICRO_BATCHES, {}))
        self.optimizer.step()
        self.optimizer.end_iteration()

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of this rank's parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.policy.parameters().items()}


def build_trainee(
    folder: Path,
    groups: ParallelGroups,
    parallel: ParallelSettings | None = None,
    optimizer: OptimizerSettings = OPTIMIZER,
    bf16: bool = False,
    lora: LoraSettings | None = None,
    ema_decay: float = 0.0,
) -> Trainee:
    """A policy with the folder's weights that has not trained yet. An average takes part of every step."""
    parallel = parallel or ParallelSettings()
    family = build_family("qwen_image", folder)
    policy = Policy(family, groups, ModelSettings(model=str(folder), height=16, width=24, bf16=bf16), parallel, lora)
    load_transformer(policy.base_parameters(), family.mapping, folder / "transformer", groups)
    if lora is not None:
        initialize_adapters(policy.adapters(), policy.mapping, groups, lora.lora_rank, seed=0)
    trainee = Trainee(policy, PolicyOptimizer(policy, optimizer, parallel, train_iters=10))
    if ema_decay:
        trainee.optimizer.keep_average(ema_decay, interval=1)
    return trainee
