# SPDX-License-Identifier: Apache-2.0
"""The policy: this rank's pipeline stage, and the two ways of running it through Megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from omni_engine.arguments import ModelSettings, ParallelSettings
from omni_engine.models.family import DenoiserInput, Family
from omni_engine.parallel import ParallelGroups

LossOf = Callable[[int, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Policy:
    """A family's network on this rank, weights still to be loaded.

    Attributes:
        stage: the bare stage module, whose parameters the mapping table names.
        model: what the schedules run; the trainer replaces it by its data-parallel wrapper of `stage`.
        version: counts the optimizer steps that made the current weights.
    """

    def __init__(self, family: Family, groups: ParallelGroups, model: ModelSettings, parallel: ParallelSettings):
        self.family = family
        self.groups = groups
        self.config = family.transformer_config(groups, parallel.sequence_parallel, model.bf16)
        self.stage = family.build_stage(self.config, groups, model.recompute_granularity == "full")
        self.model: torch.nn.Module = self.stage
        self.shape = family.latent_shape(model.height, model.width)
        self.version = 0

    @torch.no_grad()
    def evaluate(self, inputs: Sequence[DenoiserInput]) -> list[torch.Tensor]:
        """Run micro-batches forward only.

        Returns: the model's output [B, I, C] float32 of each micro-batch on the last stage, nothing on earlier ones.
        """

        def keep(output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
            return output

        return self._run(inputs, lambda _: keep, forward_only=True)

    def train(self, inputs: Sequence[DenoiserInput], loss_of: LossOf) -> list[dict[str, torch.Tensor]]:
        """Run micro-batches forward and backward, and reduce the gradients.

        Args:
            inputs: the micro-batches, equally many on every data-parallel rank.
            loss_of: (index of the micro-batch, output [B, I, C]) -> (the local sum over the global count, statistics).

        Returns: the statistics of each micro-batch on the last stage, nothing on earlier ones.
        """
        # Megatron divides a loss by the number of micro-batches and the gradients by the data-parallel size; ours is
        # a share of a global mean already.
        undo = float(len(inputs) * self.groups.dp_size)

        def loss_func(index: int) -> Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]:
            def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                value, statistics = loss_of(index, output)
                return value * undo, statistics

            return loss

        return self._run(inputs, loss_func, forward_only=False)

    def _run(
        self, inputs: Sequence[DenoiserInput], loss_func: Callable[[int], Callable[..., Any]], forward_only: bool
    ) -> list[Any]:
        def forward_step(iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            index, batch = next(iterator)
            return model(batch), loss_func(index)

        first = inputs[0]
        run = partial(
            get_forward_backward_func(),
            forward_step_func=forward_step,
            data_iterator=iter(enumerate(inputs)),
            model=[self.model],
            num_microbatches=len(inputs),
            seq_length=self._sequence_length(first),
            micro_batch_size=first.time.shape[0],
        )
        return run(forward_only=forward_only, collect_non_loss_data=forward_only)

    def _sequence_length(self, inputs: DenoiserInput) -> int:
        """Rows of the tensor between stages, as Megatron counts them: it divides them by tp under sequence parallel."""
        rows = sum(segment.length for segment in self.stage.segments(inputs))
        return rows * (self.groups.tp_size if self.config.sequence_parallel else 1)
