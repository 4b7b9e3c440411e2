# SPDX-License-Identifier: Apache-2.0
"""Run by test_communication.py under torchrun: counts what a tiny engine asks of torch.distributed, layout by layout.

    communication_worker.py FOLDER CASE ...

FOLDER holds the model. What was counted and what the formula says goes to FOLDER/CASE.RANK.json, by phase.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from omni_engine.arguments import ParallelSettings
from omni_engine.models import DenoiserInput, TextCondition
from omni_engine.models.communication import Communication, Exchange, Work
from omni_engine.models.costs import Layout
from omni_engine.models.guidance import Guidance
from omni_engine.models.qwen_image_layers import qwen_image_network
from omni_engine.parallel import ParallelGroups, destroy, initialize, leave_layout
from omni_engine.parallel.collectives import any_rank
from tools.bench.tiny_engine import TEXT_DIM, Engine, Setup, build_engine

MICRO_BATCHES, BATCH, TEXT = 3, 2, 5
"""Three micro-batches: a number that two stages do not divide, so evaluations of interleaved ones fill up a fourth."""
CHANNELS = 16


@dataclass(frozen=True)
class Case:
    parallel: ParallelSettings
    recompute: str = "none"
    bf16: bool = False
    rollout: bool = False
    micro_batches: int = MICRO_BATCHES


def layout(tp: int = 1, pp: int = 1, u: int = 1, r: int = 1, vpp: int = 1, **others: Any) -> ParallelSettings:
    return ParallelSettings(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        ulysses_degree=u,
        ring_degree=r,
        num_virtual_stages_per_pipeline_rank=vpp,
        check_param_sync=False,  # a check of some steps, no part of a step
        **others,
    )


OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
CASES = {
    "TP2": Case(layout(tp=2)),
    "TP2-SP": Case(layout(tp=2, sequence_parallel=True)),
    "TP2-SP-full": Case(layout(tp=2, sequence_parallel=True), recompute="full"),
    "TP2-selective-bf16": Case(layout(tp=2), recompute="selective", bf16=True),
    "U2": Case(layout(u=2)),
    "U2-full": Case(layout(u=2), recompute="full"),
    "R2": Case(layout(r=2)),
    "R2-bf16": Case(layout(r=2), bf16=True),
    "PP2": Case(layout(pp=2), rollout=True),
    "PP2-uneven": Case(layout(pp=2, pipeline_layout=(3, 1))),
    "PP2xVPP2": Case(layout(pp=2, vpp=2), micro_batches=4),
    "DP2": Case(layout()),
    "DP2-DO": Case(layout(use_distributed_optimizer=True)),
    "DP2-DO-bf16": Case(layout(use_distributed_optimizer=True), bf16=True),
    "DP2-overlap": Case(layout(overlap_grad_reduce=True, ddp_bucket_size=10_000)),
    "DP2-DO-overlap": Case(layout(**OVERLAP, ddp_bucket_size=10_000)),
    "U2xR2": Case(layout(u=2, r=2)),
    "TP2xU2": Case(layout(tp=2, u=2)),
    "TP2xU2-SP": Case(layout(tp=2, u=2, sequence_parallel=True)),
    "TP2xR2-SP-full-bf16": Case(layout(tp=2, r=2, sequence_parallel=True), recompute="full", bf16=True),
    "TP2xPP2-SP": Case(layout(tp=2, pp=2, sequence_parallel=True)),
    "PP2xVPP2xR2": Case(layout(pp=2, vpp=2, r=2), micro_batches=4),
    "PP4": Case(layout(pp=4)),
    "DP2xU2-DO": Case(layout(u=2, use_distributed_optimizer=True)),
    "DP2xPP2xVPP2-DO-overlap": Case(layout(pp=2, vpp=2, **OVERLAP, ddp_bucket_size=10_000), micro_batches=4),
    "DP2xTP2-SP-DO": Case(layout(tp=2, sequence_parallel=True, use_distributed_optimizer=True)),
}


class Tally(dict[str, list[int]]):
    """`kind over ranks` -> calls, bytes."""

    def add(self, kind: str, ranks: list[int], calls: int, size: int) -> None:
        self.add_key(f"{kind} over {ranks}", calls, size)

    def add_key(self, key: str, calls: int, size: int) -> None:
        before = self.get(key, [0, 0])
        self[key] = [before[0] + calls, before[1] + size]


# Operator -> kind, and which argument is the payload.
OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
}


class CommunicationCounter(TorchDispatchMode):
    """Counts every c10d operation of more than one rank by its kind and ranks. An unknown one is an error.

    All ways lead there: torch.distributed's functions, Megatron's private names for them, coalesced calls, and on the
    CPU, where one thread does all of it, the backward pass.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__()
        self.table = Tally()
        # A message is known by the peer: Megatron sends some of a pipeline of two over the group of all ranks.
        self.lines = [dist.get_process_group_ranks(group) for group in (groups.ring, groups.pp)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            operator = func.name().removeprefix("c10d::").partition(".")[0]
            if operator != "recv_":
                self._count(*OPERATORS[operator], args)
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, place: int, args: Any) -> None:
        (boxed,) = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
        name = dist.ProcessGroup.unbox(boxed).group_name
        ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name))
        if kind == "send":
            peer = ranks[args[2]]
            (ranks,) = [line for line in self.lines if peer in line]
        if len(ranks) > 1:
            payload = args[place]
            for tensor in [payload] if isinstance(payload, torch.Tensor) else payload:
                self.table.add(kind, ranks, 1, tensor.numel() * tensor.element_size())


class Prediction:
    """The formula's tables for this rank."""

    def __init__(self, engine: Engine, case: Case):
        self.groups = groups = engine.groups
        layout = Layout(case.parallel, groups.dp_size)
        held = [[int(index) for index in chunk.blocks] for chunk in engine.policy.chunks]  # type: ignore[union-attr]
        everyone: list[Any] = [None] * groups.pp_size
        dist.all_gather_object(everyone, [range(blocks[0], blocks[-1] + 1) for blocks in held], group=groups.pp)
        stages = [everyone[index % layout.pp][index // layout.pp] for index in range(layout.pp * layout.vpp)]
        network = qwen_image_network(engine.family.config)  # type: ignore[attr-defined]
        self.communication = Communication(network, layout, stages, groups.pp_rank, 2 if case.bf16 else 4)

    def table(self, exchanges: Iterable[Exchange]) -> Tally:
        """By ranks: axes that are the same ranks in this layout are one."""
        from megatron.core import parallel_state  # after omni_engine, which prepares its import

        named = {"world": dist.group.WORLD, "tp_pp": parallel_state.get_model_parallel_group()}
        table = Tally()
        for one in exchanges:
            group = named.get(one.axis) or getattr(self.groups, one.axis)
            table.add(one.kind, dist.get_process_group_ranks(group), one.count, one.bytes)
        return table


def counted(work: Callable[[], object], groups: ParallelGroups) -> Tally:
    with CommunicationCounter(groups) as counter:
        work()
    return counter.table


def inputs_of(engine: Engine, dtype: torch.dtype, count: int) -> list[DenoiserInput]:
    shape = engine.policy.shape
    embeddings = torch.randn(BATCH, TEXT, TEXT_DIM, dtype=dtype)
    embeddings[0, 3:] = 0
    one = DenoiserInput(
        {"image": torch.randn(BATCH, shape.tokens, shape.channels)},
        torch.full((BATCH,), 0.5),
        TextCondition(embeddings, (3, TEXT)),
        shape.grid,
    )
    return [one] * count


def run(folder: Path, groups: ParallelGroups, case: Case) -> dict[str, dict[str, Tally]]:
    """Counted and predicted tables of each phase of an update."""
    guidance = Guidance(3.0, "conditional") if case.rollout else Guidance(1.0, "both")
    setup = Setup(parallel=case.parallel, recompute=case.recompute, bf16=case.bf16, guidance=guidance)
    engine = build_engine(folder, groups, setup)
    policy, optimizer = engine.policy, engine.optimizer
    evaluated = inputs_of(engine, policy.config.params_dtype, MICRO_BATCHES)
    trained = inputs_of(engine, policy.config.params_dtype, case.micro_batches)

    def loss_of(index: int, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return output.square().mean(), {}

    def train() -> None:
        optimizer.zero_grad()
        policy.train(trained, loss_of)

    phases: dict[str, Callable[[], object]] = {
        "evaluate": lambda: policy.evaluate(evaluated),
        "train": train,
        "check": lambda: any_rank(True, False, False),
        "update": optimizer.step,
    }
    if case.parallel.overlap_grad_reduce:
        # Megatron overlaps from the second round on.
        for phase in phases.values():
            phase()
    measured = {name: counted(phase, groups) for name, phase in phases.items()}
    prediction = Prediction(engine, case)
    communication = prediction.communication
    tokens = {"image": policy.shape.tokens, "text": TEXT}
    expected = {
        "evaluate": communication.evaluate(Work(MICRO_BATCHES, BATCH, tokens)),
        "train": communication.train(Work(case.micro_batches, BATCH, tokens), case.recompute),
        "check": communication.check(),
        "update": communication.update(),
    }
    if case.rollout:
        measured["rollout"], expected["rollout"] = rollout(engine, communication)
    if case.parallel.overlap_param_gather:
        # The weights are gathered in whichever forward pass comes next: only the sum over a whole round is fixed.
        measured = {"round": summed(measured.values())}
        expected = {"round": [one for part in expected.values() for one in part]}
    return {name: {"counted": measured[name], "predicted": prediction.table(expected[name])} for name in measured}


def rollout(engine: Engine, communication: Communication) -> tuple[Tally, list[Exchange]]:
    """Sampling with the branches of guidance apart on the steps that are trained on, prompts encoded beforehand."""
    plan = engine.plan()
    text = engine.encoder.prepare(plan.prompts, engine.setup.guidance)
    table = counted(engine.sample, engine.groups)
    tokens = {"image": engine.policy.shape.tokens, "text": text}
    size, stages = engine.setup.optimizer.micro_batch_size, engine.groups.pp_size
    samples = Work(stages, size, tokens)
    found: list[Exchange] = []
    for _ in range(len(plan.ids) // (size * stages)):
        for step in range(engine.schedule.num_steps):
            inside = step in plan.window
            if inside:
                found += [*communication.evaluate(samples), *communication.evaluate(samples)]
            else:
                found += communication.evaluate(replace(samples, batch=2 * size))
            found += communication.rollout_broadcasts(samples, CHANNELS, inside, "image")
    return table, found


def summed(tables: Iterable[Tally]) -> Tally:
    total = Tally()
    for table in tables:
        for key, (calls, size) in table.items():
            total.add_key(key, calls, size)
    return total


def main(folder: Path, names: list[str]) -> None:
    for name in names:
        groups = initialize(CASES[name].parallel, seed=0)
        tables = run(folder, groups, CASES[name])
        (folder / f"{name}.{groups.rank}.json").write_text(json.dumps(tables))
        leave_layout()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    destroy()
