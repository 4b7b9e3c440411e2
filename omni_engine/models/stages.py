# SPDX-License-Identifier: Apache-2.0
"""A network as a list of blocks with their costs, and the cut of that list into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from operator import add
from typing import Literal, get_args

Granularity = Literal["none", "selective", "full"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)
"""How much of the forward pass is run again in the backward pass, rising."""


@dataclass(frozen=True)
class Weights:
    """Numbers of weights: divided over the tensor-parallel ranks, and held whole by each of them."""

    sharded: int = 0
    replicated: int = 0

    @property
    def total(self) -> int:
        return self.sharded + self.replicated

    def on_rank(self, tp: int) -> int:
        """Weights that one of tp ranks holds."""
        return self.sharded // tp + self.replicated

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.sharded + other.sharded, self.replicated + other.replicated)


@dataclass(frozen=True)
class Activation:
    """A tensor of one sample's pass through the network.

    Attributes:
        name: what it is, for people.
        elements: in all.
        split: over which ranks it is divided. `heads`: the tensor- and the context-parallel ones (heads, MLP features).
            `tokens`: the context ranks, and the tensor-parallel ones under sequence parallelism. `none`: it is whole on
            every rank.
        until: the strongest recompute granularity under which it is still kept for the backward pass.
        wide: float32 whatever the dtype of the network (statistics of norms and of attention).
    """

    name: str
    elements: int
    split: Literal["heads", "tokens", "none"]
    until: Granularity = "none"
    wide: bool = False

    def survives(self, recompute: str) -> bool:
        """Whether it is kept under a granularity."""
        return GRANULARITIES.index(self.until) >= GRANULARITIES.index(recompute)


@dataclass(frozen=True)
class Moment:
    """A busy moment of a block: what is there for a time, and what of that which the block has kept is free by then."""

    held: tuple[Activation, ...]
    freed: tuple[Activation, ...] = ()


@dataclass(frozen=True)
class BlockSpec:
    """One transformer block, or what a stage has besides its blocks (the embeddings, the head).

    Attributes:
        kind: what class of block it is.
        weights: all of them.
        trained: those with a gradient and optimizer state; None: all.
        idle: weights that work on one row a sample instead of on the tokens (modulation).
        work: multiply-adds of one forward pass of one sample, by term.
        frozen_work: those of weights that get no gradient; the backward pass makes the gradient of their inputs only.
        kept: what one sample's forward pass keeps for its backward pass.
        forward: the moments of its forward pass without a graph that may be the busiest.
        backward: the moments of its backward pass that may be the busiest, by recompute granularity (full: as none).
        largest: elements of the largest trained weight.
        gradient: elements of the weight whose gradient is there in the busiest moment, until it is added to the buffer.
        gathered: elements of the largest tensor that sequence parallelism gathers.
    """

    kind: str
    weights: Weights
    trained: Weights | None = None
    idle: int = 0
    work: Mapping[str, int] = field(default_factory=dict)
    frozen_work: int = 0
    kept: tuple[Activation, ...] = ()
    forward: tuple[Moment, ...] = ()
    backward: Mapping[str, tuple[Moment, ...]] = field(default_factory=dict)
    largest: int = 0
    gradient: int = 0
    gathered: int = 0

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return self.weights.total

    @property
    def trained_weights(self) -> Weights:
        return self.weights if self.trained is None else self.trained

    @property
    def multiply_adds(self) -> int:
        """Of one forward pass of one sample."""
        return sum(self.work.values())


@dataclass(frozen=True)
class ModelSpec:
    """A whole network: what the first stage has before its blocks, the blocks, what the last stage has after them."""

    embedding: BlockSpec
    blocks: tuple[BlockSpec, ...]
    head: BlockSpec

    @property
    def parts(self) -> tuple[BlockSpec, ...]:
        """All of it, in order."""
        return (self.embedding, *self.blocks, self.head)

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def trained_parameters(self) -> int:
        return sum(part.trained_weights.total for part in self.parts)

    def stage(self, blocks: range) -> tuple[BlockSpec, ...]:
        """The parts of the stage that runs these blocks."""
        before = (self.embedding,) if blocks.start == 0 else ()
        after = (self.head,) if blocks.stop == len(self.blocks) else ()
        return (*before, *self.blocks[blocks.start : blocks.stop], *after)


StageMemory = Callable[[int, Sequence[BlockSpec]], int]
"""(index of a virtual stage, its parts) -> bytes on the rank that holds it."""


def cut_stages(
    blocks: Sequence[BlockSpec],
    num_stages: int,
    *,
    first: BlockSpec | None = None,
    last: BlockSpec | None = None,
    memory: StageMemory | None = None,
) -> list[range]:
    """Contiguous ranges of blocks, one a virtual stage (PP x VPP of them), in the order in which they run.

    Work comes first, since a pipeline is as fast as its slowest stage: no cut has a smaller largest number of
    multiply-adds. Of the cuts of that number, the largest memory of a stage is the smallest; of those, memory is spread
    most evenly (the smallest sum of squares); where even that is equal, earlier stages take more blocks, as Megatron
    has it.

    Args:
        first, last: what the first stage has before its blocks and the last one after them.
        memory: of a stage; the number of its parameters where it is not given.

    Raises:
        ValueError: there are fewer blocks than stages.
    """
    count = len(blocks)
    if num_stages > count:
        raise ValueError(
            f"{count} blocks cannot fill {num_stages} pipeline stages; set --pipeline-model-parallel-size times "
            f"--num-virtual-stages-per-pipeline-rank to at most {count}"
        )

    def parts(start: int, end: int) -> tuple[BlockSpec, ...]:
        before = (first,) if first is not None and start == 0 else ()
        after = (last,) if last is not None and end == count else ()
        return (*before, *blocks[start:end], *after)

    sums = [0, *accumulate(block.multiply_adds for block in blocks)]
    before = first.multiply_adds if first is not None else 0
    after = last.multiply_adds if last is not None else 0

    def work(_: int, start: int, end: int) -> int:
        return sums[end] - sums[start] + (before if start == 0 else 0) + (after if end == count else 0)

    most_work, _ = _best_cut(count, num_stages, work, max)

    @cache
    def size(stage: int, start: int, end: int) -> int | None:
        if work(stage, start, end) > most_work:
            return None
        here = parts(start, end)
        return sum(part.parameters for part in here) if memory is None else memory(stage, here)

    most_memory, _ = _best_cut(count, num_stages, size, max)

    def square(stage: int, start: int, end: int) -> int | None:
        found = size(stage, start, end)
        return None if found is None or found > most_memory else found * found

    _, ends = _best_cut(count, num_stages, square, add)
    return [range(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]


def _best_cut(
    count: int,
    stages: int,
    cost: Callable[[int, int, int], int | None],
    combine: Callable[[int, int], int],
) -> tuple[int, tuple[int, ...]]:
    """The cut of the smallest combined cost, by dynamic programming from the last stage to the first.

    Args:
        cost: (stage, first block, end) -> its cost, None where that is not allowed.
        combine: (cost of a stage, combined cost of the later ones) -> their combined cost; must not fall.
    Returns: the combined cost and the end of each stage. Of equal cuts, the one with more blocks in earlier stages.
    """
    tails: dict[int, tuple[int, tuple[int, ...]]] = {count: (0, ())}
    for stage in reversed(range(stages)):
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        ends = sorted(tails, reverse=True)
        for start in range(stage, count) if stage else (0,):
            for end in ends:
                here = cost(stage, start, end) if end > start else None
                if here is None:
                    continue
                total = combine(here, tails[end][0])
                if start not in found or total < found[start][0]:
                    found[start] = (total, (end, *tails[end][1]))
        tails = found
    return tails[0]


def stages_from_layout(layout: Sequence[int], num_blocks: int, num_stages: int) -> list[range]:
    """The ranges of a layout given by hand: blocks of each virtual stage, in the order in which they run.

    Nothing for an empty layout.

    Raises:
        ValueError: another number of stages or of blocks, or a stage without a block; the message has the remedy.
    """
    if not layout:
        return []
    shown = " ".join(map(str, layout))
    if len(layout) != num_stages:
        raise ValueError(
            f"--pipeline-layout {shown} names {len(layout)} stages, but pipeline ranks times virtual stages are "
            f"{num_stages}: give {num_stages} numbers"
        )
    if min(layout) < 1:
        raise ValueError(f"--pipeline-layout {shown} has a stage without a block: give every stage at least 1")
    if sum(layout) != num_blocks:
        raise ValueError(
            f"--pipeline-layout {shown} adds up to {sum(layout)} blocks, but the model has {num_blocks}: "
            f"{'add' if sum(layout) < num_blocks else 'take away'} {abs(num_blocks - sum(layout))}"
        )
    return [range(end - length, end) for length, end in zip(layout, accumulate(layout), strict=True)]


def in_flight(rank: int, pp: int, vpp: int, micro_batches: int) -> Iterator[tuple[int, ...]]:
    """How many micro-batches each of a rank's chunks holds for its backward pass, after each forward pass of 1F1B.

    After Megatron's `forward_backward_pipelining_without_interleaving` and `..._with_interleaving` (groups of pp
    micro-batches): a rank runs `warmup` forward passes, then one forward and one backward in turn.

    Yields: a count for each of the vpp chunks.
    """
    chunks = [
        chunk
        for first in range(0, micro_batches, pp)
        for chunk in range(vpp)
        for _ in range(first, min(first + pp, micro_batches))
    ]
    warmup = pp - rank - 1 if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * pp
    held = [0] * vpp
    for step, chunk in enumerate(chunks):
        if step > warmup:
            held[vpp - 1 - chunks[step - warmup - 1]] -= 1
        held[chunk] += 1
        yield tuple(held)
