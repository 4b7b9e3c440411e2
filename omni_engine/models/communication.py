# SPDX-License-Identifier: Apache-2.0
"""What a rank exchanges with others in a step, counted before it runs: on which axis, what, how often, how many bytes.

A family lists its layers (`Network`); how each kind of layer communicates follows from the classes of
`parallel/linear.py`, from `parallel/usp.py` and from Megatron's schedules and buckets. Exact: the tests hold it against
what torch.distributed is really asked for. Groups of one rank exchange nothing and are left out.

Legend: b samples of a forward pass, S tokens of a stream on a context rank (padded, then divided by cp), J the same of
all streams, H hidden, e bytes of an element of the network; in and out are features of a whole layer.

Payload is the tensor that the call is about:

| kind | payload | sent by a rank of n, ring algorithm |
| --- | --- | --- |
| all_reduce | the tensor | 2 (n - 1) / n of it |
| all_gather | the gathered whole | (n - 1) / n |
| reduce_scatter | the whole that is summed | (n - 1) / n |
| all_to_all | what a rank holds | (n - 1) / n |
| broadcast, send | the tensor | once |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from omni_engine.models.costs import FLOAT, Layout

Axis = Literal["tp", "ulysses", "ring", "cp", "tp_cp", "pp", "dp_cp", "tp_pp", "world"]
"""Groups of `ParallelGroups`; `tp_pp` is what Megatron calls the model-parallel group, without the context axis."""
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


@dataclass(frozen=True)
class Exchange:
    """`count` calls of one kind, each with a payload of so many bytes, and why they are made."""

    axis: Axis
    kind: Kind
    payload: int
    count: int
    reason: str

    @property
    def bytes(self) -> int:
        return self.payload * self.count

    def sent(self, ranks: int) -> float:
        """Bytes that a rank of an axis of `ranks` sends, by ring algorithms."""
        share = (ranks - 1) / ranks
        factor = {"all_reduce": 2 * share, "broadcast": 1.0, "send": 1.0}.get(self.kind, share)
        return self.bytes * factor


Totals = dict[tuple[Axis, Kind], tuple[int, int]]


def totals(exchanges: Iterable[Exchange]) -> Totals:
    """(axis, kind) -> calls, bytes."""
    found: Totals = {}
    for one in exchanges:
        count, size = found.get((one.axis, one.kind), (0, 0))
        found[one.axis, one.kind] = (count + one.count, size + one.bytes)
    return found


@dataclass(frozen=True)
class Layer:
    """A layer as communication sees it.

    Attributes:
        kind: `column`, `row`, `modulation`, `replicated`: linear layers, by their class in parallel/linear.py.
            `vector`: a weight by feature that works on tokens, `head_norm`: one that works on the heads of a rank.
            `attention`: joint attention of all streams. `gather`: the shards of a stream's output brought together.
        stream: whose tokens it works on; `rows`: the conditioning row of a sample; `joint`: all streams.
        inputs, outputs: features, of all ranks together.
        idle: held, but neither run nor trained.
    """

    kind: Literal["column", "row", "modulation", "replicated", "vector", "head_norm", "attention", "gather"]
    stream: str
    inputs: int
    outputs: int
    idle: bool = False

    def parameters(self, tp: int) -> tuple[int, ...]:
        """Elements of its parameters on a rank, in the order of `named_parameters`."""
        if self.kind in ("column", "modulation"):
            return self.inputs * self.outputs // tp, self.outputs // tp
        if self.kind == "row":
            return self.inputs // tp * self.outputs, self.outputs
        if self.kind == "replicated":
            return self.inputs * self.outputs, self.outputs
        return () if self.kind in ("attention", "gather") else (self.outputs,)

    def partial(self, sequence_parallel: bool) -> int:
        """Elements whose gradient is a part of a sum over the tensor-parallel ranks, so that Megatron adds them up."""
        if self.kind == "head_norm":
            return self.outputs  # each rank has seen its own heads
        if not sequence_parallel or self.stream == "rows":
            return 0
        # Each rank has seen its own tokens.
        if self.kind == "row":
            return self.outputs  # the bias; the weight is sharded
        return sum(self.parameters(1)) if self.kind in ("replicated", "vector") else 0


@dataclass(frozen=True)
class Network:
    """A family's layers: before the blocks, of each block, after the blocks; each in the order of its parameters."""

    hidden: int
    streams: tuple[str, ...]
    embedding: tuple[Layer, ...]
    blocks: tuple[tuple[Layer, ...], ...]
    head: tuple[Layer, ...]

    def stage(self, blocks: range) -> tuple[Layer, ...]:
        """The layers of a virtual stage."""
        before = self.embedding if blocks.start == 0 else ()
        after = self.head if blocks.stop == len(self.blocks) else ()
        return (*before, *(layer for block in self.blocks[blocks.start : blocks.stop] for layer in block), *after)


@dataclass(frozen=True)
class Work:
    """A run through the pipeline's schedule.

    Attributes:
        micro_batches: their number.
        batch: samples of each; twice as many where the branches of guidance are joined.
        tokens: of a sample by stream, padding included.
    """

    micro_batches: int
    batch: int
    tokens: Mapping[str, int]


ExchangesOf = Callable[[Layer, Work], Iterator[Exchange]]


class Communication:
    """Everything that one rank exchanges under a layout. The ranks of a pipeline stage are alike."""

    def __init__(self, network: Network, layout: Layout, stages: Sequence[range], pp_rank: int, element: int):
        """
        Args:
            stages: blocks of every virtual stage, in the order in which they run.
            element: bytes of an element of the network, 2 or 4.
        """
        self.network, self.layout, self.parallel, self.element = network, layout, layout.parallel, element
        self.stages, self.pp_rank = stages, pp_rank
        self.chunks = [network.stage(blocks) for blocks in stages[pp_rank :: layout.pp]]

    def ranks(self, axis: Axis) -> int:
        """Ranks of an axis."""
        layout, parallel = self.layout, self.parallel
        return {
            "tp": layout.tp,
            "ulysses": parallel.ulysses_degree,
            "ring": parallel.ring_degree,
            "cp": layout.cp,
            "tp_cp": layout.tp * layout.cp,
            "pp": layout.pp,
            "dp_cp": layout.dp * layout.cp,
            "tp_pp": layout.tp * layout.pp,
            "world": layout.devices,
        }[axis]

    # ---- what the trainer and the rollout do

    def evaluate(self, work: Work) -> list[Exchange]:
        """`Policy.evaluate`: forward passes without a graph."""
        # Interleaved stages take micro-batches in groups of one a stage; the last group is filled up.
        missing = -work.micro_batches % self.layout.pp if self.layout.vpp > 1 else 0
        return self.forward(replace(work, micro_batches=work.micro_batches + missing))

    def train(self, work: Work, recompute: str) -> list[Exchange]:
        """`Policy.train`: forward, backward, gradients reduced. `recompute`: none, selective or full."""
        return [*self.forward(work), *self.backward(work, recompute), *self.reduce_gradients()]

    def forward(self, work: Work) -> list[Exchange]:
        """Forward passes of all micro-batches."""
        found = [*self._layers(work, self._forward_of), *self._sends(work, forward=True)]
        return self._kept(found, work.micro_batches)

    def backward(self, work: Work, recompute: str) -> list[Exchange]:
        """Backward passes of all micro-batches.

        Full recomputation runs a block forward once more and exchanges all of it again. Selective recomputation makes
        again only what lies between two exchanges.
        """
        found = [*self._layers(work, self._backward_of), *self._sends(work, forward=False)]
        if recompute == "full":
            again = [
                replace(one, reason=f"{one.reason}, again (recomputed)")
                for blocks in self.stages[self.pp_rank :: self.layout.pp]
                for block in self.network.blocks[blocks.start : blocks.stop]
                for layer in block
                if not layer.idle
                for one in self._forward_of(layer, work)
            ]
            found.extend(again)
        return self._kept(found, work.micro_batches)

    def reduce_gradients(self) -> list[Exchange]:
        """Once after the last micro-batch (or, overlapped, within its backward pass)."""
        kind: Kind = "reduce_scatter" if self.parallel.use_distributed_optimizer else "all_reduce"
        found = [
            Exchange("dp_cp", kind, FLOAT * elements, 1, "gradients summed over the ranks that hold the same weights")
            for elements in self._buckets()
        ]
        partial = sum(
            layer.partial(self.parallel.sequence_parallel)
            for layers in self.chunks
            for layer in layers
            if not layer.idle
        )
        if partial:
            reason = "gradients of weights held whole that saw a part of the heads or tokens, in one call"
            found.append(Exchange("tp", "all_reduce", FLOAT * partial, 1, reason))
        return self._kept(found, 1)

    def update(self) -> list[Exchange]:
        """The optimizer's step. With --overlap-param-gather the weights are gathered in the next forward pass."""
        distributed = self.parallel.use_distributed_optimizer
        found = [
            Exchange("world" if distributed else "tp_pp", "all_reduce", FLOAT, 1, "square of the gradient norm"),
        ]
        if distributed:
            reason = "stepped weights, each rank having stepped its part"
            found += [Exchange("dp_cp", "all_gather", self.element * size, 1, reason) for size in self._buckets()]
        return self._kept(found, 1)

    def check(self) -> list[Exchange]:
        """The look at an update before the weights move, in which all ranks agree to go on."""
        reason = "three flags: log-probs disagree, a ratio moved, a gradient is not finite"
        return self._kept([Exchange("world", "all_reduce", 3 * FLOAT, 1, reason)], 1)

    def rollout_broadcasts(self, work: Work, latent_channels: int, has_log_prob: bool, stream: str) -> list[Exchange]:
        """After a sampling step: the last stage gives every stage the new latents, and the log-probs of a step that is
        trained on. `work.batch` counts samples, not branches."""
        latents = FLOAT * work.batch * work.tokens[stream] * latent_channels
        found = [Exchange("pp", "broadcast", latents, 1, "latents after a step")]
        if has_log_prob:
            found.append(Exchange("pp", "broadcast", 8 * work.batch, 1, "log-probs of a step, float64"))
        return self._kept(found, work.micro_batches)

    # ---- how each kind of layer communicates, for one micro-batch

    def _local(self, work: Work, stream: str) -> int:
        """Tokens of a stream on a context rank, padding to equal parts included."""
        streams = self.network.streams if stream == "joint" else (stream,)
        return sum(self.layout.padded(work.tokens[name]) for name in streams) // self.layout.cp

    def _forward_of(self, layer: Layer, work: Work) -> Iterator[Exchange]:
        b, e = work.batch, self.element
        if layer.kind == "column" and self.parallel.sequence_parallel:
            size = self._local(work, layer.stream) * b * layer.inputs * e  # S b in
            yield Exchange("tp", "all_gather", size, 1, f"{layer.stream} tokens into a column-parallel layer")
        elif layer.kind == "row":
            size = self._local(work, layer.stream) * b * layer.outputs * e  # S b out
            kind: Kind = "reduce_scatter" if self.parallel.sequence_parallel else "all_reduce"
            yield Exchange("tp", kind, size, 1, f"{layer.stream} tokens out of a row-parallel layer")
        elif layer.kind == "modulation":
            yield Exchange("tp", "all_gather", b * layer.outputs * e, 1, "modulation, whole on every rank")
        elif layer.kind == "attention":
            held = self._local(work, "joint") * b * layer.outputs // self.layout.tp * e  # J b H / tp
            yield Exchange("ulysses", "all_to_all", 3 * held, 1, "queries, keys, values: tokens to heads")
            yield Exchange("ulysses", "all_to_all", held, 1, "attention's output: heads to tokens")
            # u times the tokens, a u-th of the heads: as many keys and values as before the exchange.
            yield Exchange("ring", "send", 2 * held, self.parallel.ring_degree - 1, "keys and values around the ring")
        elif layer.kind == "gather":
            axis: Axis = "tp_cp" if self.parallel.sequence_parallel else "cp"
            size = self._local(work, layer.stream) * self.layout.cp * b * layer.outputs * e
            yield Exchange(axis, "all_gather", size, 1, "velocities, for the loss over whole samples")

    def _backward_of(self, layer: Layer, work: Work) -> Iterator[Exchange]:
        b, e = work.batch, self.element
        if layer.kind == "column":
            size = self._local(work, layer.stream) * b * layer.inputs * e
            if self.parallel.sequence_parallel:
                yield Exchange("tp", "all_gather", size, 1, f"{layer.stream} tokens again, for the weight's gradient")
            kind: Kind = "reduce_scatter" if self.parallel.sequence_parallel else "all_reduce"
            yield Exchange("tp", kind, size, 1, f"gradient of {layer.stream} tokens into a column-parallel layer")
        elif layer.kind == "row" and self.parallel.sequence_parallel:
            size = self._local(work, layer.stream) * b * layer.outputs * e
            yield Exchange("tp", "all_gather", size, 1, f"gradient of {layer.stream} tokens out of a row-parallel one")
        elif layer.kind == "modulation":
            if self.parallel.sequence_parallel:
                reason = "gradient of the modulation, of which each rank saw a part"
                yield Exchange("tp", "reduce_scatter", b * layer.outputs * e, 1, reason)
            yield Exchange("tp", "all_reduce", b * layer.inputs * e, 1, "gradient of the conditioning rows")
        elif layer.kind == "attention":
            held = self._local(work, "joint") * b * layer.outputs // self.layout.tp * e
            yield Exchange("ulysses", "all_to_all", held, 1, "gradient of attention's output: tokens to heads")
            yield Exchange("ulysses", "all_to_all", 3 * held, 1, "gradient of queries, keys, values: heads to tokens")
            yield Exchange(
                "ring", "send", 2 * held, self.parallel.ring_degree - 1, "keys and values around the ring once more"
            )
            wide = 2 * held // e * FLOAT
            yield Exchange(
                "ring",
                "send",
                wide,
                self.parallel.ring_degree - 1,
                "gradients of keys and values, float32, from the next rank home",
            )

    def _layers(self, work: Work, of: ExchangesOf) -> Iterator[Exchange]:
        for layers in self.chunks:
            for layer in layers:
                if not layer.idle:
                    yield from of(layer, work)

    def _sends(self, work: Work, forward: bool) -> Iterator[Exchange]:
        """The packed tensor of every stream's local tokens and the conditioning row: each virtual stage sends it on,
        but the last; its gradient goes back, but from the first. Micro-batches of unequal shape (there are none in a
        run) would announce each of these by a message of 24 bytes."""
        rows = self._local(work, "joint") * self.layout.cp // self.layout.token_parts + 1
        own = range(len(self.stages))[self.pp_rank :: self.layout.pp]
        ends = own.count(len(self.stages) - 1 if forward else 0)
        reason = "tokens and conditioning row to the next stage" if forward else "their gradient to the stage before"
        size = rows * work.batch * self.network.hidden * self.element
        yield Exchange("pp", "send", size, len(own) - ends, reason)

    # ---- gradients

    def _buckets(self) -> list[int]:
        """Elements of every bucket of this rank, as `_ParamAndGradBuffer` fills them (megatron-core 0.16.1)."""
        found = []
        for index, layers in enumerate(self.chunks):
            limit = None
            # Only what runs on the first stage, and first there, is worth cutting up.
            if self.parallel.overlap_grad_reduce and self.pp_rank == 0 and index == 0:
                limit = self.parallel.ddp_bucket_size or max(40_000_000, 1_000_000 * self.layout.dp)
            sizes = [size for layer in layers if not layer.idle for size in layer.parameters(self.layout.tp)]
            found += self._filled(sizes, limit)
        return found

    def _filled(self, sizes: Sequence[int], limit: int | None) -> list[int]:
        """Buckets of a chunk's parameters, last parameter first. The distributed optimizer lets parameters begin at
        multiples of 64 elements, and buckets end at multiples of 128 and of the ranks."""
        distributed = self.parallel.use_distributed_optimizer
        begin, whole = (64, math.lcm(self.layout.dp * self.layout.cp, 128)) if distributed else (1, 1)
        found, start, end = [], 0, 0
        for size in reversed(sizes):
            end = _up(end, begin) + size
            if limit is not None and end - start >= limit:
                end = _up(end, whole)
                found.append(end - start)
                start = end
        if end > start:
            found.append(_up(end, whole) - start)
        return found

    def _kept(self, exchanges: Iterable[Exchange], times: int) -> list[Exchange]:
        """Those between several ranks, each `times` as often; equal ones are joined."""
        found: dict[tuple[Axis, Kind, int, str], int] = {}
        for one in exchanges:
            if self.ranks(one.axis) > 1 and one.count:
                key = (one.axis, one.kind, one.payload, one.reason)
                found[key] = found.get(key, 0) + one.count * times
        return [Exchange(axis, kind, size, count, reason) for (axis, kind, size, reason), count in found.items()]


def _up(number: int, unit: int) -> int:
    """Rounded up to a multiple."""
    return -(-number // unit) * unit
