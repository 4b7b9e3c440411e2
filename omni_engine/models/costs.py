# SPDX-License-Identifier: Apache-2.0
"""Memory of a rank and FLOPs of an iteration, counted from a family's `ModelSpec` before anything runs.

Bytes a weight, w = 2 in bfloat16 and 4 in float32:

| part | bytes | of |
| --- | --- | --- |
| weights | w | all weights of the rank's stages, divided by tp where they are sharded |
| gradients | 4 | the trained ones: Megatron's float32 buffer |
| optimizer | 8; 12 where w is 2 | the trained ones: both moments of Adam, float32 main weights |
| reference | w | all weights, where a KL term needs them as they were (with adapters: nothing, they are left out) |
| average | 4 | the trained ones, with --ema-decay |
| rollout copy | its own w | all weights over its own tp; the native engine has none |

The optimizer's are divided by dp x cp under the distributed optimizer, less what is offloaded to the host.

Activations: what autograd keeps of each micro-batch in flight, and the busiest moment of a backward pass. Under full
recomputation a block keeps its input only, and one block at a time is whole. An optimizer step needs memory of its own
at another time, so the larger of the two counts. Not counted: the allocator's fragmentation, the device's context,
buffers of the communication library, the working memory of the text encoder and of the autoencoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property

from omni_engine.arguments import ParallelSettings, RolloutSettings
from omni_engine.models.stages import (
    Activation,
    BlockSpec,
    ModelSpec,
    Moment,
    cut_stages,
    in_flight,
    stages_from_layout,
)

FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Layout:
    """How ranks share the work.

    Attributes:
        dp: replicas of the policy.
    """

    parallel: ParallelSettings
    dp: int = 1

    @property
    def tp(self) -> int:
        return self.parallel.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        return self.parallel.pipeline_model_parallel_size

    @property
    def vpp(self) -> int:
        return self.parallel.num_virtual_stages_per_pipeline_rank

    @property
    def cp(self) -> int:
        return self.parallel.context_parallel_size

    @property
    def devices(self) -> int:
        return self.parallel.model_parallel_size * self.dp

    @property
    def token_parts(self) -> int:
        """Equal parts that a stream's tokens are padded to."""
        return self.cp * (self.tp if self.parallel.sequence_parallel else 1)

    @property
    def optimizer_parts(self) -> int:
        """Ranks that share optimizer state."""
        return self.dp * self.cp if self.parallel.use_distributed_optimizer else 1

    def padded(self, tokens: int) -> int:
        return -(-tokens // self.token_parts) * self.token_parts

    def on_rank(self, activation: Activation) -> float:
        """Elements of an activation that one rank holds."""
        parts = {"heads": self.tp * self.cp, "tokens": self.token_parts, "none": 1}[activation.split]
        return activation.elements / parts

    def describe(self) -> str:
        """The layout in words, such as `TP2+SP x Ulysses2 x DP2+DO`."""
        parallel = self.parallel
        named = [
            (self.tp, f"TP{self.tp}" + ("+SP" if parallel.sequence_parallel else "")),
            (parallel.ulysses_degree, f"Ulysses{parallel.ulysses_degree}"),
            (parallel.ring_degree, f"Ring{parallel.ring_degree}"),
            (self.pp, f"PP{self.pp}" + (f"xVPP{self.vpp}" if self.vpp > 1 else "")),
            (self.dp, f"DP{self.dp}"),
        ]
        text = " x ".join(name for size, name in named if size > 1) or "one process"
        return text + (" + distributed optimizer" if parallel.use_distributed_optimizer else "")


@dataclass(frozen=True)
class Training:
    """What memory depends on besides network and layout.

    Attributes:
        bf16: the network's dtype; float32 otherwise.
        recompute: none, selective or full.
        passes: samples of a forward pass with a graph: the micro-batch, twice where both branches of guidance get one.
        rollout_passes: of a forward pass of the rollout: the micro-batch, twice with guidance.
        micro_batches: of an update on one rank.
        reference, average: whether copies of the weights are held for a KL term, and as a moving average.
        adapters: LoRA: the reference is the frozen base.
        step: how Adam steps: `fused` in place; `each`: torch's loop over weights, which is what it does on
            a CPU; `all`: torch's foreach, with a copy of all weights it steps.
        copied: the communication library scatters and gathers by way of a copy of the whole tensor, as gloo does.
    """

    bf16: bool
    recompute: str = "none"
    passes: int = 1
    rollout_passes: int = 1
    micro_batches: int = 1
    reference: bool = False
    average: bool = False
    adapters: bool = False
    step: str = "fused"
    copied: bool = False

    @property
    def weight_bytes(self) -> int:
        return 2 if self.bf16 else FLOAT


@dataclass(frozen=True)
class Rollout:
    """An engine beside the trainer that holds weights of its own. The native one samples with the trainer's.

    Attributes:
        weight_bytes: of one weight; 0: no copy.
        tp: ranks that share the copy.
    """

    weight_bytes: int = 0
    tp: int = 1


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by part, at its peak."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    optimizer_step: float = 0.0
    rollout_copy: float = 0.0
    reference: float = 0.0
    average: float = 0.0
    components: float = 0.0
    samples: float = 0.0

    @property
    def total(self) -> float:
        """Activations and the memory of an optimizer step are there at different times."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        transient = max(parts.pop("activations"), parts.pop("optimizer_step"))
        return float(sum(parts.values()) + transient)


class MemoryModel:
    """Memory of the ranks of a pipeline under a layout."""

    def __init__(self, spec: ModelSpec, layout: Layout, training: Training):
        """`spec`: for samples with their padding (`Layout.padded`)."""
        self.spec, self.layout, self.training = spec, layout, training
        # Most blocks are one object, so what costs time is done once for each.
        self._kept_by_part: dict[int, float] = {}
        self._in_flight = cache(self._counts)

    @cached_property
    def stages(self) -> list[range]:
        """Blocks of every virtual stage, by hand or cut by work and memory."""
        layout, blocks = self.layout, self.spec.blocks
        count = layout.pp * layout.vpp
        by_hand = stages_from_layout(layout.parallel.pipeline_layout, len(blocks), count)
        return by_hand or cut_stages(
            blocks, count, first=self.spec.embedding, last=self.spec.head, memory=self._stage_bytes
        )

    def of_rank(self, pp_rank: int) -> Memory:
        """Of one pipeline rank, without components, samples and a rollout copy."""
        chunks = [self.spec.stage(blocks) for blocks in self.stages[pp_rank :: self.layout.pp]]
        parts = [part for chunk in chunks for part in chunk]
        held = sum(part.weights.on_rank(self.layout.tp) for part in parts)
        trained = sum(part.trained_weights.on_rank(self.layout.tp) for part in parts)
        weight = self.training.weight_bytes
        return Memory(
            weights=weight * held,
            gradients=FLOAT * trained,
            optimizer=self._state_bytes * trained,
            activations=self._activations(chunks, pp_rank),
            optimizer_step=self._step_bytes(parts, trained),
            reference=weight * held if self.training.reference and not self.training.adapters else 0.0,
            average=FLOAT * trained if self.training.average else 0.0,
        )

    def rollout_copy(self, rollout: Rollout) -> float:
        return rollout.weight_bytes * self.spec.parameters / rollout.tp

    @property
    def _state_bytes(self) -> float:
        """Optimizer state of a trained weight on a rank."""
        parallel = self.layout.parallel
        here = 1.0 - (parallel.optimizer_offload_fraction if parallel.optimizer_cpu_offload else 0.0)
        return here * (2 * FLOAT + (FLOAT if self.training.bf16 else 0)) / self.layout.optimizer_parts

    def _step_bytes(self, parts: Sequence[BlockSpec], trained: float) -> float:
        """The most that reducing gradients, stepping and gathering weights need, one after the other."""
        shared = self.layout.optimizer_parts > 1
        return max(self._adam_bytes(parts, trained), FLOAT * trained if self.training.copied and shared else 0.0)

    def _adam_bytes(self, parts: Sequence[BlockSpec], trained: float) -> float:
        if self.training.step == "all":
            return FLOAT * trained / self.layout.optimizer_parts
        if self.training.step == "each":
            # The root of a second moment, that root divided, and what is left of the weight before.
            return FLOAT * max(2 * part.largest + part.gradient for part in parts) / self.layout.tp
        return 0.0

    def _stage_bytes(self, stage: int, parts: Sequence[BlockSpec]) -> int:
        """Bytes of a virtual stage, for the cut: what it holds, and what its micro-batches in flight keep."""
        tp, rank, chunk = self.layout.tp, stage % self.layout.pp, stage // self.layout.pp
        held = self.training.weight_bytes * sum(part.weights.on_rank(tp) for part in parts)
        trained = (FLOAT + self._state_bytes) * sum(part.trained_weights.on_rank(tp) for part in parts)
        most = max(counts[chunk] for counts in self._in_flight(rank))
        return round(held + trained + most * self.kept(parts))

    def _counts(self, rank: int) -> set[tuple[int, ...]]:
        """Micro-batches in flight of each chunk of a rank, at the moments of an update."""
        # The schedule repeats itself after its first rounds.
        enough = min(self.training.micro_batches, 4 * self.layout.pp)
        return set(in_flight(rank, self.layout.pp, self.layout.vpp, enough))

    def _activations(self, chunks: Sequence[Sequence[BlockSpec]], rank: int) -> float:
        """The fullest moment of a step: forward passes done, the backward pass of the last of them begun."""
        kept = [self.kept(chunk) for chunk in chunks]
        most = max(sum(n * one for n, one in zip(counts, kept, strict=True)) for counts in self._in_flight(rank))
        blocks = [part for chunk in chunks for part in chunk if part.backward]
        kinds = {id(block): block for block in blocks}.values()
        busiest = max(self._busiest(chunk) for chunk in chunks)
        alone = max(self._moment(moment) for block in kinds for moment in block.forward)
        rollout = alone * self.training.rollout_passes / self.training.passes
        return max(most, most + busiest, rollout) + self._exchanged(blocks)

    def _busiest(self, chunk: Sequence[BlockSpec]) -> float:
        """What the busiest moment of a chunk's backward pass holds, less what later parts have kept, which is free."""
        found, freed, known = [0.0], 0.0, dict[int, float]()
        for part in reversed(chunk):
            if part.backward:
                if id(part) not in known:
                    known[id(part)] = self._backward(part)
                found.append(known[id(part)] - freed)
            freed += self.kept([part])
        return max(found)

    def kept(self, parts: Iterable[BlockSpec]) -> float:
        known, recompute = self._kept_by_part, self.training.recompute
        total = 0.0
        for part in parts:
            if id(part) not in known:
                known[id(part)] = self._bytes(one for one in part.kept if one.survives(recompute))
            total += known[id(part)]
        return total

    def _backward(self, block: BlockSpec) -> float:
        """What the backward pass of a block holds besides what is kept."""
        again = self.training.recompute == "full"
        moments = block.backward["none" if again else self.training.recompute]
        remade = self._bytes(one for one in block.kept if not one.survives("full")) if again else 0.0
        gradient = self.training.weight_bytes * block.gradient / self.layout.tp
        return remade + max(self._moment(moment) for moment in moments) + gradient

    def _moment(self, moment: Moment) -> float:
        return self._bytes(moment.held) - self._bytes(moment.freed)

    def _exchanged(self, blocks: Sequence[BlockSpec]) -> float:
        """Buffers of exchanges: what sequence parallelism gathers (a buffer that stays, and a gradient), what is sent
        to the next stage and the gradient that comes back."""
        scale = self.training.passes * self.training.weight_bytes
        copies = 3 if self.training.copied else 2
        gathered = copies * max(block.gathered for block in blocks) / self.layout.cp
        total = gathered * scale if self.layout.parallel.sequence_parallel else 0.0
        if self.layout.pp > 1:
            between = [one for one in blocks[0].kept if one.survives("full")]
            total += 2 * self._bytes(between)
        return total

    def _bytes(self, activations: Iterable[Activation]) -> float:
        """Of a micro-batch on one rank."""
        elements = (
            (FLOAT if one.wide else self.training.weight_bytes, self.layout.on_rank(one)) for one in activations
        )
        return self.training.passes * sum(size * count for size, count in elements)


@dataclass(frozen=True)
class Passes:
    """How often one branch of guidance runs on a sample in an iteration.

    Attributes:
        rollout: forward passes that sample.
        trained: passes with a gradient.
        alone: forward passes of an update without one: of a detached branch, the reference, old log-probs.
    """

    rollout: int
    trained: int
    alone: int


def passes_of_branches(rollout: RolloutSettings, reference: bool) -> list[Passes]:
    """Passes of the conditional branch and, with guidance, of the unconditional one.

    Args:
        reference: a KL term compares with the reference weights.
    """
    window = rollout.sde_window_size
    extra = int(reference) + int(rollout.old_log_prob == "recompute")
    with_gradient = Passes(rollout.num_inference_steps, window, window * extra)
    if rollout.true_cfg_scale <= 1:
        return [with_gradient]
    detached = Passes(rollout.num_inference_steps, 0, window * (extra + 1))
    return [with_gradient, detached if rollout.cfg_gradient == "conditional" else with_gradient]


def forward_flops(parts: Iterable[BlockSpec]) -> int:
    """FLOPs of one forward pass of one sample through these parts: two for each multiply-add."""
    return 2 * sum(part.multiply_adds for part in parts)


def training_flops(parts: Sequence[BlockSpec]) -> int:
    """FLOPs of a forward and backward pass of one sample, recomputation not counted.

    Forward once; backward once for the gradients of inputs and once for those of weights, which frozen weights do not
    have. Attention has two products forward and four backward, so it is three times as well.
    """
    return 3 * forward_flops(parts) - 2 * sum(part.frozen_work for part in parts)


def recomputed_flops(parts: Iterable[BlockSpec], recompute: str) -> int:
    """What a backward pass runs again: the blocks under full recomputation. Element-wise work counts nothing."""
    return forward_flops(part for part in parts if part.backward) if recompute == "full" else 0


def branch_flops(spec: ModelSpec, passes: Passes) -> int:
    """Model FLOPs of a branch of a sample in an iteration, as MFU counts them: no recomputation.

    Args:
        spec: for the branch's own text, without padding.
    """
    return (passes.rollout + passes.alone) * forward_flops(spec.parts) + passes.trained * training_flops(spec.parts)
