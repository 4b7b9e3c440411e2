# SPDX-License-Identifier: Apache-2.0
"""The one tensor that travels between pipeline stages, packed from a list of segments.

Megatron's backward step runs one output tensor a stage, so streams, texts and conditioning rows share one
[S, B, H] tensor. Lengths come from the batch on every stage; only values travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Segment:
    """A named run of rows. `length` counts rows on this rank: tokens of a stream, or conditioning rows.

    Tokens are divided over the tensor-parallel axis under sequence parallel; conditioning rows are whole on each rank.
    """

    name: str
    length: int


def pack(parts: Mapping[str, torch.Tensor], layout: Sequence[Segment]) -> torch.Tensor:
    """Concatenate parts [length, B, H] in layout order into [S, B, H].

    Raises:
        ValueError: a part has another length than its segment.
    """
    for segment in layout:
        if parts[segment.name].shape[0] != segment.length:
            raise ValueError(
                f"segment '{segment.name}' has {parts[segment.name].shape[0]} rows, the layout says {segment.length}"
            )
    return torch.cat([parts[segment.name] for segment in layout])


def unpack(packed: torch.Tensor, layout: Sequence[Segment]) -> dict[str, torch.Tensor]:
    """Split [S, B, H] back into named parts (views).

    Raises:
        ValueError: the tensor has another number of rows than the layout.
    """
    total = sum(segment.length for segment in layout)
    if packed.shape[0] != total:
        raise ValueError(f"a stage received {packed.shape[0]} rows where the layout {list(layout)} has {total}")
    pieces = packed.split([segment.length for segment in layout])
    return {segment.name: piece for segment, piece in zip(layout, pieces, strict=True)}
