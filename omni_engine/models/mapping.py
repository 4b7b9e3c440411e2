# SPDX-License-Identifier: Apache-2.0
"""One table a family: which Hugging Face tensors make up a parameter, and how it is sharded.

Loading, exporting, saving, resuming and weight sync all read this table; no other place knows a parameter's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ParameterMapping:
    """How one parameter of our module is made of Hugging Face tensors.

    Attributes:
        target: dotted path in the stage module; `{}` stands for the global block index.
        sources: Hugging Face names, fused along dim 0 in this order; each is sharded by itself, so that a rank holds
            [q; k; v] of its own heads.
        shard_dim: the dim of each source that is divided over the tensor-parallel axis, None where it is replicated.
    """

    target: str
    sources: tuple[str, ...]
    shard_dim: int | None

    def at(self, block: int) -> ParameterMapping:
        """The entry of one block."""
        return ParameterMapping(
            self.target.format(block), tuple(name.format(block) for name in self.sources), self.shard_dim
        )

    def split(self, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of a rank's parameter, one a source, in order."""
        return local.chunk(len(self.sources)) if len(self.sources) > 1 else (local,)


def linear(target: str, *sources: str, weight_dim: int | None, bias_dim: int | None) -> list[ParameterMapping]:
    """The weight and bias entries of a linear layer, fused from several where more sources are given."""
    return [
        ParameterMapping(f"{target}.weight", tuple(f"{name}.weight" for name in sources), weight_dim),
        ParameterMapping(f"{target}.bias", tuple(f"{name}.bias" for name in sources), bias_dim),
    ]


def column(target: str, *sources: str) -> list[ParameterMapping]:
    """Entries of a column-parallel linear layer."""
    return linear(target, *sources, weight_dim=0, bias_dim=0)


def row(target: str, *sources: str) -> list[ParameterMapping]:
    """Entries of a row-parallel linear layer."""
    return linear(target, *sources, weight_dim=1, bias_dim=None)


def replicated(target: str, *sources: str) -> list[ParameterMapping]:
    """Entries of a linear layer held whole on every rank."""
    return linear(target, *sources, weight_dim=None, bias_dim=None)


class ModelMapping:
    """A family's table, expanded over its blocks.

    Raises:
        ValueError: a target or a source stands in two entries.
    """

    def __init__(self, entries: Sequence[ParameterMapping], num_blocks: int):
        self.entries: dict[str, ParameterMapping] = {}
        seen: set[str] = set()
        for entry in entries:
            blocks = range(num_blocks) if "{}" in entry.target else range(1)
            for resolved in (entry.at(block) for block in blocks):
                clash = [name for name in resolved.sources if name in seen]
                if clash or resolved.target in self.entries:
                    raise ValueError(f"the mapping table names {clash or resolved.target} twice")
                seen.update(resolved.sources)
                self.entries[resolved.target] = resolved

    @property
    def source_names(self) -> set[str]:
        """All Hugging Face names of the model."""
        return {name for entry in self.entries.values() for name in entry.sources}

    def of(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, ParameterMapping]:
        """The entries of a stage's parameters.

        Raises:
            ValueError: a parameter has no entry.
        """
        missing = sorted(set(parameters) - set(self.entries))
        if missing:
            raise ValueError(f"the mapping table has no entry for {', '.join(missing)}")
        return {name: self.entries[name] for name in parameters}
