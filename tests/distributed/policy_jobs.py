# SPDX-License-Identifier: Apache-2.0
"""What policy_worker.py runs a tiny model on: micro-batches of samples that are the same whatever they are batched
with, and the layouts that test_token_lengths.py and test_pipeline_lengths.py try them under."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from omni_engine.models import DenoiserInput, TextCondition
from tools.bench.parity_layouts import LAYOUTS, Layout, layout
from tools.bench.tiny_engine import TEXT_DIM

CHANNELS = 16
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Sample:
    """Image and text of a sample, made of its number alone."""

    number: int
    text: int


@dataclass(frozen=True)
class Batch:
    """A micro-batch; `tokens`: what its texts are padded to, the longest where not given."""

    grid: Grid
    samples: tuple[Sample, ...]
    tokens: int = 0

    def inputs(self) -> DenoiserInput:
        """What the policy is given."""
        rows = [normal(sample.number, 0, sample.text, TEXT_DIM) for sample in self.samples]
        tokens = self.tokens or max(sample.text for sample in self.samples)
        latents = torch.stack([normal(sample.number, 1, self.image, CHANNELS) for sample in self.samples])
        time = torch.tensor([0.1 + 0.07 * (sample.number % 10) for sample in self.samples])
        return DenoiserInput({"image": latents}, time, TextCondition.collate(rows, tokens), self.grid)

    def cotangent(self) -> torch.Tensor:
        """What the velocity is multiplied by in the loss, [B, I, C]: then the loss of a sample is its own."""
        return torch.stack([normal(sample.number, 2, self.image, CHANNELS) for sample in self.samples])

    @property
    def image(self) -> int:
        """Image tokens."""
        return self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(frozen=True)
class Job:
    """Micro-batches under a layout; `planted`: attributes of Megatron's config that are set against our own choice."""

    layout: Layout
    batches: tuple[Batch, ...]
    planted: dict[str, Any] = field(default_factory=dict)


def normal(number: int, stream: int, *shape: int) -> torch.Tensor:
    """Standard normals that depend on the sample, and on which of its tensors they are for."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * number + stream))


def batch(grid: Grid, *texts: int, first: int = 0, tokens: int = 0) -> Batch:
    """Samples with texts of these lengths, numbered from `first`."""
    return Batch(grid, tuple(Sample(first + place, text) for place, text in enumerate(texts)), tokens)


WIDE = (1, 3, 4)
"""Twelve tokens: no padding on up to four ranks."""
PADDINGS = {
    "alone": (batch(WIDE, 8), batch(WIDE, 12, first=1)),
    "padded": (batch(WIDE, 8, 12),),
    "extra": (batch(WIDE, 8, 12, tokens=17),),
}
"""The same two samples: by themselves, where no mask is needed; in one batch; in one with five more tokens of padding,
which no number of ranks divides."""
ODD = {
    # On a ring of four the last rank has no image token at all, and a text token of one sample only, or of none.
    "few": (batch((1, 1, 5), 1, 8), batch((1, 1, 5), 3, 1, first=2), batch((1, 1, 1), 1, first=4)),
    "7": (batch((1, 1, 7), 1, 5),),
    "33": (batch((1, 3, 11), 5, 77),),
    "1023": (batch((1, 11, 93), 77, 1),),
}
SHARDED = {name: LAYOUTS[name] for name in ("ONE", "U2", "R2", "TP2-SP", "U2xR2", "TP2xR2-SP")}
SHARDED["R4"] = layout(ring_degree=4)
"""The layouts that divide tokens."""

# Texts, pictures and batch sizes differ between neighbours. Eight micro-batches fill every pipeline here.
VARIED = tuple(
    batch((1, 2, width), *texts, first=10 * number)
    for number, (width, texts) in enumerate(
        [(4, (3, 9)), (4, (5,)), (6, (2, 2)), (4, (9, 3)), (6, (1,)), (3, (7, 4)), (4, (12,)), (5, (2, 6))]
    )
)
UNIFORM = tuple(batch(WIDE, 8, 8, first=2 * number) for number in range(8))
STAGES = {name: LAYOUTS[name] for name in ("ONE", "PP2xVPP2", "PP4", "TP2xPP2-SP", "PP2xVPP2xR2")}
STAGES["PP4xVPP2"] = layout(pp=4, num_virtual_stages_per_pipeline_rank=2)
"""The layouts with stages, of eight blocks."""
BATCHED = {"batch_p2p_comm": True, "overlap_p2p_comm": False}
"""What Megatron does by default, and we do not with virtual stages."""

JOBS = (
    {
        f"{name}-{case}": Job(layout_, batches)
        for name, layout_ in SHARDED.items()
        for case, batches in (PADDINGS | ODD).items()
    }
    | {f"{name}-varied": Job(layout_, VARIED) for name, layout_ in STAGES.items()}
    | {f"{name}-uniform": Job(STAGES[name], UNIFORM) for name in ("ONE", "PP2xVPP2")}
    | {"PP2xVPP2-batched": Job(STAGES["PP2xVPP2"], UNIFORM, planted=BATCHED)}
)
