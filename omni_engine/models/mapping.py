# SPDX-License-Identifier: Apache-2.0
"""One table a family: which Hugging Face tensors make up a parameter, and how it is sharded.

Loading, exporting, saving, resuming and weight sync all read this table; no other place knows a parameter's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

_WEIGHT, _ADAPTER = ".weight", ".adapter."


@dataclass(frozen=True)
class ParameterMapping:
    """How one parameter of our module is made of Hugging Face tensors.

    Attributes:
        target: dotted path in the stage module; `{}` stands for the global block index.
        sources: Hugging Face names, fused along dim 0 in this order; each is sharded by itself, so that a rank holds
            [q; k; v] of its own heads.
        shard_dim: the dim of each source that is divided over the tensor-parallel axis, None where it is replicated.
        is_linear: whether it is the weight of a linear layer, which may get an adapter.
    """

    target: str
    sources: tuple[str, ...]
    shard_dim: int | None
    is_linear: bool = False

    def at(self, block: int) -> ParameterMapping:
        """The entry of one block."""
        sources = tuple(name.format(block) for name in self.sources)
        return replace(self, target=self.target.format(block), sources=sources)

    def split(self, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of a rank's parameter, one a source, in order."""
        return local.chunk(len(self.sources)) if len(self.sources) > 1 else (local,)


def linear(target: str, *sources: str, weight_dim: int | None, bias_dim: int | None) -> list[ParameterMapping]:
    """The weight and bias entries of a linear layer, fused from several where more sources are given."""
    weights = tuple(f"{name}{_WEIGHT}" for name in sources)
    return [
        ParameterMapping(f"{target}{_WEIGHT}", weights, weight_dim, is_linear=True),
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


@dataclass(frozen=True)
class AdapterPlace:
    """Where one of our linear layers gets adapters.

    Attributes:
        layer: dotted path of the layer in the stage module.
        weight: the entry of its weight.
        places: which of the fused sources are adapted, in order.
    """

    layer: str
    weight: ParameterMapping
    places: tuple[int, ...]

    def entries(self) -> list[ParameterMapping]:
        """The adapters' two parameters, with peft's names. A has the input of the layer and B the output, and each is
        divided where the weight is."""
        modules = [self.weight.sources[place].removesuffix(_WEIGHT) for place in self.places]
        dim = self.weight.shard_dim
        return [
            ParameterMapping(
                f"{self.layer}{_ADAPTER}down", tuple(f"{m}.lora_A{_WEIGHT}" for m in modules), 1 if dim == 1 else None
            ),
            ParameterMapping(
                f"{self.layer}{_ADAPTER}up", tuple(f"{m}.lora_B{_WEIGHT}" for m in modules), 0 if dim == 0 else None
            ),
        ]


def is_adapter(path: str) -> bool:
    """Whether a parameter's path is that of an adapter."""
    return _ADAPTER in path


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

    def adapter_places(self, targets: Sequence[str]) -> list[AdapterPlace]:
        """The linear layers that peft would adapt: a target is a Hugging Face module name or its last parts.

        Raises:
            ValueError: a target is no linear layer of the model; the message names those that are.
        """
        matched: set[str] = set()

        def adapted(module: str) -> bool:
            found = {target for target in targets if module == target or module.endswith(f".{target}")}
            matched.update(found)
            return bool(found)

        places = []
        for layer, weight in self._linears():
            modules = [name.removesuffix(_WEIGHT) for name in weight.sources]
            chosen = tuple(place for place, module in enumerate(modules) if adapted(module))
            if chosen:
                places.append(AdapterPlace(layer, weight, chosen))
        unknown = [target for target in targets if target not in matched]
        if unknown:
            raise ValueError(
                f"--lora-target-modules {' '.join(unknown)}: the model has no such linear layer; it has "
                f"{', '.join(self._linear_names())}"
            )
        return places

    def with_adapters(self, targets: Sequence[str]) -> ModelMapping:
        """The table with the entries of adapters besides.

        Raises:
            ValueError: a target is no linear layer of the model.
        """
        entries = [entry for place in self.adapter_places(targets) for entry in place.entries()]
        return ModelMapping([*self.entries.values(), *entries], 1)

    def _linears(self) -> Iterator[tuple[str, ParameterMapping]]:
        """Path and weight of our linear layers."""
        for target, entry in self.entries.items():
            if entry.is_linear:
                yield target.removesuffix(_WEIGHT), entry

    def _linear_names(self) -> list[str]:
        """Their Hugging Face names, without the blocks they lie in."""
        names = (name.removesuffix(_WEIGHT) for _, entry in self._linears() for name in entry.sources)
        return sorted({re.sub(r"^\w+\.\d+\.", "", name) for name in names})

    def of(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, ParameterMapping]:
        """The entries of a stage's parameters.

        Raises:
            ValueError: a parameter has no entry.
        """
        missing = sorted(set(parameters) - set(self.entries))
        if missing:
            raise ValueError(f"the mapping table has no entry for {', '.join(missing)}")
        return {name: self.entries[name] for name in parameters}
