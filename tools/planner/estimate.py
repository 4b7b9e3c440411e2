# SPDX-License-Identifier: Apache-2.0
"""Memory and time of a job under a layout.

Time is arithmetic, not measurement: FLOPs of the slowest stage over the rate that is assumed to be reached, pipeline
bubbles, and bytes that a rank sends over the bandwidth that is assumed, nothing hidden behind computing. Rewards, text
encoding, decoding of pictures and the optimizer's arithmetic are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from omni_engine.models.communication import Communication, Exchange, Work
from omni_engine.models.costs import (
    FLOAT,
    Memory,
    MemoryModel,
    Training,
    branch_flops,
    forward_flops,
    recomputed_flops,
    training_flops,
)
from omni_engine.models.stages import BlockSpec, ModelSpec
from tools.planner.candidates import Candidate
from tools.planner.job import Job, Machine


@dataclass(frozen=True)
class Seconds:
    """Of an iteration by phase."""

    rollout: float
    rollout_communication: float
    update: float
    update_communication: float

    @property
    def total(self) -> float:
        return self.rollout + self.rollout_communication + self.update + self.update_communication


class Estimate:
    """A job under a candidate layout."""

    def __init__(self, job: Job, machine: Machine, candidate: Candidate):
        self.job, self.machine, self.candidate, self.layout = job, machine, candidate, candidate.layout
        layout = self.layout
        image, text = layout.padded(job.image_tokens), layout.padded(job.text_tokens)
        self.tokens = {"image": image, "text": text}
        self.spec = _spec(job, image, text, layout.cp > 1)
        self.samples = job.samples // layout.dp
        self.micro_batches = self.samples // job.updates // job.micro_batch_size * job.rollout.sde_window_size
        training = Training(
            bf16=job.bf16,
            recompute=candidate.recompute,
            passes=job.micro_batch_size * job.joint,
            rollout_passes=job.micro_batch_size * len(job.branches),
            micro_batches=self.micro_batches,
            reference=job.reference,
            average=job.average,
            adapters=job.lora.enabled,
            step=job.optimizer_step,
        )
        self.model = MemoryModel(self.spec, layout, training)

    # ---- memory

    @cached_property
    def ranks(self) -> list[Memory]:
        """Memory of the fullest rank of every pipeline stage."""
        job = self.job
        found = []
        for pp_rank in range(self.layout.pp):
            memory = self.model.of_rank(pp_rank)
            found.append(
                replace(
                    memory,
                    rollout_copy=self.model.rollout_copy(job.engine),
                    components=job.model.components_bytes if pp_rank == 0 else 0,
                    samples=job.samples_bytes(self.layout.dp),
                )
            )
        return found

    @cached_property
    def fullest(self) -> int:
        """The pipeline rank with the most memory."""
        return max(range(self.layout.pp), key=lambda rank: self.ranks[rank].total)

    @property
    def memory(self) -> Memory:
        """Of the fullest rank."""
        return self.ranks[self.fullest]

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.machine.usable_bytes

    @property
    def flags(self) -> str:
        """What the engine is asked for."""
        return self.candidate.flags(tuple(len(blocks) for blocks in self.model.stages))

    # ---- time

    @cached_property
    def seconds(self) -> Seconds:
        """Of the phases of an iteration."""
        job, layout = self.job, self.layout
        steps, window = job.rollout.num_inference_steps, job.rollout.sde_window_size
        # The rollout runs one micro-batch a stage together.
        together = min(layout.pp, -(-self.samples // job.micro_batch_size))
        runs = -(-self.samples // (job.micro_batch_size * together)) * steps
        branches = len(job.branches)
        one = Work(together, job.micro_batch_size * branches, self.tokens)
        sample_forward = self._pass(forward_flops) * branches
        rollout = runs * self._filled(together) * sample_forward

        alone = sum(passes.alone for passes in job.branches) / window
        with_gradient = self._pass(
            lambda parts: training_flops(parts) + recomputed_flops(parts, self.candidate.recompute)
        )
        update = (
            job.updates
            * self._filled(self.micro_batches)
            * (job.joint * with_gradient + alone * self._pass(forward_flops))
        )
        return Seconds(
            rollout=rollout,
            rollout_communication=max(
                runs * self._sending(rank, [*rank.evaluate(one), *self._broadcasts(rank, one)])
                for rank in self._communication
            ),
            update=update,
            update_communication=job.updates * max(self._updating(rank, alone) for rank in self._communication),
        )

    @property
    def images_per_second(self) -> float:
        """Of a device."""
        return self.job.samples / self.seconds.total / self.machine.devices

    @property
    def mfu(self) -> float:
        """That the assumed efficiency leaves after bubbles, recomputation and communication."""
        flops = self.job.samples * sum(branch_flops(self._own_spec, passes) for passes in self.job.branches)
        return flops / self.seconds.total / self.machine.devices / self.machine.peak_flops

    @property
    def _own_spec(self) -> ModelSpec:
        return _spec(self.job, self.job.image_tokens, self.job.text_tokens, False)

    def _pass(self, flops: Callable[[Sequence[BlockSpec]], int]) -> float:
        """Seconds of a micro-batch of one branch on the slowest pipeline rank."""
        layout, stages = self.layout, self.model.stages
        ranks = [
            [part for blocks in stages[rank :: layout.pp] for part in self.spec.stage(blocks)]
            for rank in range(layout.pp)
        ]
        rate = self.machine.peak_flops * self.machine.efficiency * layout.tp * layout.cp
        return self.job.micro_batch_size * max(map(flops, ranks)) / rate

    def _filled(self, micro_batches: int) -> float:
        """Micro-batches and the pipeline's bubble, in passes of a rank."""
        return micro_batches + (self.layout.pp - 1) / self.layout.vpp

    @cached_property
    def _communication(self) -> list[Communication]:
        """Of the ranks that may send most: the first, the last, and the one between with the most blocks."""
        network, element = self.job.family.network(), 2 if self.job.bf16 else FLOAT
        pp, stages = self.layout.pp, self.model.stages
        between = range(1, pp - 1)
        busiest = [max(between, key=lambda rank: sum(map(len, stages[rank::pp])))] if between else []
        return [Communication(network, self.layout, stages, rank, element) for rank in sorted({0, *busiest, pp - 1})]

    def _broadcasts(self, rank: Communication, work: Work) -> list[Exchange]:
        channels = self.job.family.latent_shape(self.job.height, self.job.width).channels
        return rank.rollout_broadcasts(replace(work, batch=self.job.micro_batch_size), channels, False, "image")

    def _updating(self, rank: Communication, alone: float) -> float:
        """Seconds that an update spends on communication."""
        job = self.job
        joint = Work(self.micro_batches, job.micro_batch_size * job.joint, self.tokens)
        single = replace(joint, batch=job.micro_batch_size)
        passes = [*rank.forward(joint), *rank.backward(joint, self.candidate.recompute)]
        gradients = [*rank.reduce_gradients(), *rank.update()]
        # Adapters are all that is reduced and gathered of a model that is frozen otherwise.
        share = self.spec.trained_parameters / self.spec.parameters if job.lora.enabled else 1.0
        return (
            self._sending(rank, passes)
            + alone * self._sending(rank, rank.evaluate(single))
            + share * self._sending(rank, gradients)
        )

    def _sending(self, rank: Communication, exchanges: Iterable[Exchange]) -> float:
        """Seconds that a rank sends, one exchange after the other."""
        return sum(
            one.sent(rank.ranks(one.axis)) / self.machine.bandwidth_of(self._extent(one.axis)) for one in exchanges
        )

    def _extent(self, axis: str) -> int:
        """Neighbouring ranks among which the members of a group lie; Megatron's order is tp, cp, dp, pp."""
        layout = self.layout
        inner = {
            "tp": layout.tp,
            "ulysses": layout.tp * layout.parallel.ulysses_degree,
            "dp_cp": layout.tp * layout.cp * layout.dp,
        }
        if axis in ("ring", "cp", "tp_cp"):
            return layout.tp * layout.cp
        return inner.get(axis, layout.devices)


@lru_cache(maxsize=64)
def _spec(job: Job, image_tokens: int, text_tokens: int, context_parallel: bool) -> ModelSpec:
    return job.family.costs(image_tokens, text_tokens, context_parallel=context_parallel, lora=job.lora)
