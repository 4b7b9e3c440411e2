# SPDX-License-Identifier: Apache-2.0
"""The layouts that a job could be run under on so many devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from omni_engine.arguments import ParallelSettings
from omni_engine.models.costs import Layout
from tools.planner.job import Job, Machine

VIRTUAL_STAGES = (1, 2)
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    """A layout with a recompute granularity."""

    layout: Layout
    recompute: str

    def flags(self, pipeline_layout: tuple[int, ...]) -> str:
        """The flags that ask for it, `pipeline_layout` among them where there are stages."""
        parallel = self.layout.parallel
        numbers = {
            "tensor-model-parallel-size": parallel.tensor_model_parallel_size,
            "ulysses-degree": parallel.ulysses_degree,
            "ring-degree": parallel.ring_degree,
            "pipeline-model-parallel-size": parallel.pipeline_model_parallel_size,
            "num-virtual-stages-per-pipeline-rank": parallel.num_virtual_stages_per_pipeline_rank,
        }
        parts = [f"--{name} {number}" for name, number in numbers.items() if number > 1]
        if parallel.sequence_parallel:
            parts.append("--sequence-parallel")
        if parallel.use_distributed_optimizer:
            parts.append("--use-distributed-optimizer")
        if len(pipeline_layout) > 1:
            parts.append(f"--pipeline-layout {' '.join(map(str, pipeline_layout))}")
        return " ".join([*parts, f"--recompute-granularity {self.recompute}"])


def candidates(job: Job, machine: Machine, fixed: Mapping[str, object]) -> Iterator[Candidate]:
    """Every layout that the engine takes, tensor parallelism within a machine.

    Args:
        fixed: values of `ParallelSettings` fields, and of `recompute`, that are asked for.
    """
    sizes = [size for size in range(1, machine.devices + 1) if machine.devices % size == 0]
    for tp, ulysses, ring, pp in product(sizes, sizes, sizes, sizes):
        replica = tp * ulysses * ring * pp
        if machine.devices % replica or job.model.heads % (tp * ulysses) or tp > machine.per_node:
            continue
        dp = machine.devices // replica
        if not _divides(job, dp):
            continue
        for sequence_parallel, virtual, distributed, recompute in product(
            (False, True) if tp > 1 else (False,),
            VIRTUAL_STAGES if pp > 1 else (1,),
            (False, True) if dp * ulysses * ring > 1 else (False,),
            RECOMPUTE,
        ):
            # Interleaved stages take micro-batches in groups of one a stage.
            if pp * virtual > job.model.blocks or (virtual > 1 and _micro_batches(job, dp) % pp):
                continue
            values = {
                "tensor_model_parallel_size": tp,
                "sequence_parallel": sequence_parallel,
                "ulysses_degree": ulysses,
                "ring_degree": ring,
                "pipeline_model_parallel_size": pp,
                "num_virtual_stages_per_pipeline_rank": virtual,
                "use_distributed_optimizer": distributed,
            }
            if all(fixed.get(name, value) == value for name, value in {**values, "recompute": recompute}.items()):
                yield Candidate(Layout(ParallelSettings(**values), dp), recompute)


def _divides(job: Job, dp: int) -> bool:
    """Whether each replica gets whole prompts of every update, and whole micro-batches of them."""
    shares = job.updates * dp
    return job.prompts % shares == 0 and (job.samples // shares) % job.micro_batch_size == 0


def _micro_batches(job: Job, dp: int) -> int:
    """Of an update on one replica."""
    return job.samples // dp // job.updates // job.micro_batch_size * job.rollout.sde_window_size
