# SPDX-License-Identifier: Apache-2.0
"""Linear layers that say how they are sharded over the tensor-parallel axis.

A model file uses these classes and has no branch on the layout. Weights are left uninitialised: they come from a
checkpoint (checkpoint/huggingface.py refuses a module of which a parameter was not covered).

Each of them may carry an adapter, which is attached from outside (models/adapters.py) and brings its own sharding.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from omni_engine.parallel.lora import LoraAdapter
from omni_engine.platform import get_platform


def keep_uninitialized(tensor: torch.Tensor) -> torch.Tensor:
    """An init method that leaves the weights to the checkpoint."""
    return tensor


def adapted(adapter: LoraAdapter | None, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The output y of a layer for x, with what its adapter adds."""
    return y if adapter is None else adapter(x, y)


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """Y = X W^T + b, output features sharded. X [S, B, in] (S/tp under sequence parallel) -> Y [S, B, out/tp]."""

    on_tokens = True

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig):
        super().__init__(
            in_features,
            out_features,
            config=config,
            init_method=keep_uninitialized,
            bias=True,
            gather_output=False,
            tp_group=get_tensor_model_parallel_group(),
        )
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        self.adapter: LoraAdapter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # One rank has nothing to communicate, and addmm saves the pass that Megatron spends on the bias.
        alone = self.tp_group.size() == 1 and not self.gradient_accumulation_fusion
        y = F.linear(x, self.weight, self.bias) if alone else super().forward(x)[0]
        return adapted(self.adapter, x, y)


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """Y = X W^T + b, input features sharded and summed. X [S, B, in/tp] -> Y [S, B, out] (S/tp under SP)."""

    on_tokens = True

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig):
        super().__init__(
            in_features,
            out_features,
            config=config,
            init_method=keep_uninitialized,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=get_tensor_model_parallel_group(),
        )
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=1, stride=1)
        self.adapter: LoraAdapter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        alone = self.tp_group.size() == 1 and not self.gradient_accumulation_fusion
        y = F.linear(x, self.weight, self.bias) if alone else super().forward(x)[0]
        return adapted(self.adapter, x, y)


class ModulationLinear(ColumnParallelLinear):
    """Column-sharded linear on the replicated conditioning rows, its output gathered: [R, B, in] -> [R, B, out].

    Modulation is a third of an MMDiT's weights and next to none of its work, so the weights are sharded and the small
    result is gathered. Without sequence parallel every rank ends with the same gradient of the gathered output, of
    which it keeps its slice; under sequence parallel each rank has seen its own tokens only, so the slices are summed.
    """

    on_tokens = False

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig):
        # The product is taken here, so nothing is asked of apex, which Megatron's class would look for.
        plain = copy.copy(config)
        plain.gradient_accumulation_fusion = False
        super().__init__(in_features, out_features, plain)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.tp_group.size() == 1:
            return adapted(self.adapter, rows, F.linear(rows, self.weight, self.bias))
        copied = copy_to_tensor_model_parallel_region(rows, group=self.tp_group)
        local = adapted(self.adapter, rows, F.linear(copied, self.weight, self.bias))
        gather = (
            all_gather_last_dim_from_tensor_parallel_region
            if self.sequence_parallel
            else gather_from_tensor_model_parallel_region
        )
        return gather(local, group=self.tp_group)


class ReplicatedLinear(torch.nn.Linear):
    """Linear held whole on every tensor-parallel rank.

    `on_tokens`: the input is sharded by sequence under sequence parallel, so the gradient is partial and Megatron's
    `finalize_model_grads` sums it over the tensor-parallel axis. Conditioning rows are replicated: nothing to sum.
    """

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig, on_tokens: bool):
        super().__init__(in_features, out_features, device=get_platform().device(), dtype=config.params_dtype)
        self.on_tokens = on_tokens
        self.adapter: LoraAdapter | None = None
        for parameter in self.parameters():
            mark_replicated(parameter, config, on_tokens)

    def reset_parameters(self) -> None:
        """Leave the weights to the checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return adapted(self.adapter, x, super().forward(x))


def mark_replicated(parameter: torch.nn.Parameter, config: TransformerConfig, on_tokens: bool) -> None:
    """Tell Megatron whether the gradient of a replicated parameter is partial under sequence parallel."""
    parameter.sequence_parallel = config.sequence_parallel and on_tokens  # type: ignore[attr-defined]
