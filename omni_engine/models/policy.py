# SPDX-License-Identifier: Apache-2.0
"""The policy: this rank's pipeline stage, and the two ways of running it through Megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from omni_engine.arguments import LoraSettings, ModelSettings, ParallelSettings
from omni_engine.models.adapters import attach_adapters
from omni_engine.models.costs import Layout, MemoryModel, Training
from omni_engine.models.family import DenoiserInput, Family, Stage
from omni_engine.models.mapping import ModelMapping, is_adapter
from omni_engine.parallel import ParallelGroups
from omni_engine.platform import get_platform
from omni_engine.platform.attention_kernels import MathKernel

TYPICAL_TEXT_TOKENS, TYPICAL_MICRO_BATCH_SIZE = 128, 4
"""For the cut into stages, which must not depend on the batch."""

LossOf = Callable[[int, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Policy:
    """A family's network on this rank, weights still to be loaded.

    Attributes:
        chunks: the bare stage modules of this rank, one a virtual stage; the mapping table names their parameters.
        models: what the schedules run; the trainer replaces them by its data-parallel wrappers of `chunks`.
        mapping: the family's table, with the adapters' entries where there are any.
        lora: settings of the adapters; None where all weights are trained.
        version: counts the optimizer steps that made the current weights.
    """

    def __init__(
        self,
        family: Family,
        groups: ParallelGroups,
        model: ModelSettings,
        parallel: ParallelSettings,
        lora: LoraSettings | None = None,
    ):
        """With `lora` enabled the model is frozen but for its adapters, which are zero so far.

        Raises:
            ValueError: the adapters' target modules are not those of the model.
        """
        self.family = family
        self.groups = groups
        self.shape = family.latent_shape(model.height, model.width)
        self.config = family.transformer_config(groups, parallel, model.bf16)
        use_math = parallel.ring_attention_kernel == "math"
        kernel = MathKernel() if use_math else get_platform().attention_kernel()
        self.chunks: list[Stage] = []
        for index, blocks in enumerate(self._own_blocks(model, parallel, lora)):
            chunk = family.build_stage(self.config, groups, blocks, kernel, model.recompute_granularity)
            chunk.vp_stage = index if groups.vpp_size > 1 else None
            self.chunks.append(chunk)
        self.models: list[torch.nn.Module] = list(self.chunks)
        self.mapping: ModelMapping = family.mapping
        self.lora = lora if lora is not None and lora.enabled else None
        if self.lora is not None:
            self.mapping = attach_adapters(self.chunks, family.mapping, self.lora, self.config)
        self.version = 0

    def _own_blocks(self, model: ModelSettings, parallel: ParallelSettings, lora: LoraSettings | None) -> list[range]:
        """Blocks of this rank's virtual stages: rank p of pp holds the stages p, p + pp, p + 2 pp, ..."""
        layout = Layout(parallel, self.groups.dp_size)
        spec = self.family.costs(self.shape.tokens, TYPICAL_TEXT_TOKENS, context_parallel=layout.cp > 1, lora=lora)
        filled = Training(
            bf16=model.bf16,
            recompute=model.recompute_granularity,
            passes=TYPICAL_MICRO_BATCH_SIZE,
            micro_batches=2 * self.groups.pp_size,
        )
        return MemoryModel(spec, layout, filled).stages[self.groups.pp_rank :: self.groups.pp_size]

    @property
    def stage(self) -> Stage:
        """The only chunk.

        Raises:
            ValueError: this rank has several virtual stages.
        """
        (chunk,) = self.chunks
        return chunk

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by path. Paths carry the global number of a block, so those of chunks are distinct."""
        return {path: parameter for chunk in self.chunks for path, parameter in chunk.named_parameters()}

    def base_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those of the model folder's transformer."""
        return {path: parameter for path, parameter in self.parameters().items() if not is_adapter(path)}

    def adapters(self) -> dict[str, torch.nn.Parameter]:
        """Those of the adapters; none where all weights are trained."""
        return {path: parameter for path, parameter in self.parameters().items() if is_adapter(path)}

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those that the optimizer moves."""
        return {path: parameter for path, parameter in self.parameters().items() if parameter.requires_grad}

    def own_parameters(self) -> dict[str, torch.nn.Parameter]:
        """What tells this policy from the model folder, and so what a checkpoint holds: the adapters, or all of it."""
        return self.adapters() or self.parameters()

    @torch.no_grad()
    def evaluate(self, inputs: Sequence[DenoiserInput]) -> list[torch.Tensor]:
        """Run micro-batches forward only.

        Returns: the model's output [B, I, C] float32 of each micro-batch on the last stage, nothing on earlier ones.
        """

        def keep(output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
            return output

        # Interleaved stages take micro-batches in groups of one a stage; a last, smaller group is filled up.
        missing = -len(inputs) % self.groups.pp_size if self.groups.vpp_size > 1 else 0
        outputs = self._run([*inputs, *[inputs[-1]] * missing], lambda _: keep, forward_only=True)
        return outputs[: len(inputs)]

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

        shapes = {(self._sequence_length(batch), batch.time.shape[0]) for batch in inputs}
        # Stages tell each other the shapes where they differ; where not, that exchange is saved.
        self.config.variable_seq_lengths = len(shapes) > 1
        sequence_length, micro_batch_size = next(iter(shapes))
        iterators = [iter(enumerate(inputs)) for _ in self.models]
        run = partial(
            get_forward_backward_func(),
            forward_step_func=forward_step,
            data_iterator=iterators if self.groups.vpp_size > 1 else iterators[0],
            model=self.models,
            num_microbatches=len(inputs),
            seq_length=sequence_length,
            micro_batch_size=micro_batch_size,
        )
        return run(forward_only=forward_only, collect_non_loss_data=forward_only)

    def _sequence_length(self, inputs: DenoiserInput) -> int:
        """Rows of the tensor between stages, as Megatron counts them: before it divides them over tp and cp."""
        rows = sum(segment.length for segment in self.chunks[0].segments(inputs))
        return rows * self.groups.cp_size * (self.groups.tp_size if self.config.sequence_parallel else 1)
