# SPDX-License-Identifier: Apache-2.0
"""Rules of the parallel layout."""

from __future__ import annotations

from omni_engine.arguments.parallel import ParallelSettings
from omni_engine.arguments.pipeline_folder import PipelineFacts
from omni_engine.arguments.rules import Rules, divisors, listed, multiples_near

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "ulysses_degree", "ring_degree")


def layout_names(parallel: ParallelSettings) -> list[str]:
    """The flags that make a replica as large as it is: tp and pp, and the others where they are used."""
    return [name for name in SIZES if name in SIZES[:2] or getattr(parallel, name) > 1]


def check_layout(rules: Rules, facts: PipelineFacts, world_size: int) -> None:
    """Sizes against the number of processes, the model's heads and its blocks."""
    parallel = rules.settings.parallel
    size = parallel.model_parallel_size
    if world_size % size:
        names = layout_names(parallel)
        product = " x ".join(str(getattr(parallel, name)) for name in names)
        rules.refuse(
            names,
            f"{world_size} processes cannot be cut into model replicas of {product} = {size}",
            f"Start {multiples_near(world_size, size)} processes, or choose sizes whose product divides {world_size}",
        )
    _check_heads(rules, facts)
    _check_stages(rules, facts)
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        rules.refuse(
            ["sequence_parallel", "tensor_model_parallel_size"],
            "tokens are shared by the TP ranks, of which there is one",
            "Use --no-sequence-parallel or --tensor-model-parallel-size 2 or more",
        )


def _check_heads(rules: Rules, facts: PipelineFacts) -> None:
    """TP and Ulysses both divide the heads; a ring does not."""
    heads, parallel = facts.attention_heads, rules.settings.parallel
    if heads is None:
        return
    tensor, ulysses = parallel.tensor_model_parallel_size, parallel.ulysses_degree
    if heads % tensor:
        what = f"the model's {heads} attention heads cannot be shared by {tensor} ranks"
        rules.refuse(["tensor_model_parallel_size"], what, f"Use one of {listed(divisors(heads))}")
    elif heads % (tensor * ulysses):
        own = heads // tensor
        rules.refuse(
            ["ulysses_degree", "tensor_model_parallel_size"],
            f"the {own} attention heads of a TP rank cannot be shared by {ulysses} ranks",
            f"Use one of {listed(divisors(own))} as --ulysses-degree, and --ring-degree for the rest: a ring shares no "
            "heads",
        )


def _check_stages(rules: Rules, facts: PipelineFacts) -> None:
    parallel = rules.settings.parallel
    stages, virtual = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    names = ["pipeline_model_parallel_size"]
    if virtual > 1:
        names = ["num_virtual_stages_per_pipeline_rank", *names]
        if stages == 1:
            rules.refuse(
                names,
                "stages are interleaved over pipeline ranks, of which there is one",
                "Use --num-virtual-stages-per-pipeline-rank 1 or --pipeline-model-parallel-size 2 or more",
            )
            return
    blocks, layout = facts.layers, parallel.pipeline_layout
    if blocks is not None and stages * virtual > blocks:
        times = f" of {virtual} stages each" if virtual > 1 else ""
        rules.refuse(
            names, f"the model has {blocks} blocks, fewer than stages", f"Use at most {blocks // virtual}{times}"
        )
    elif layout and len(layout) != stages * virtual:
        what = f"{len(layout)} numbers for {stages * virtual} stages"
        rules.refuse(
            ["pipeline_layout", *names], what, "Give the blocks of every stage, in the order in which they run"
        )
    elif layout and blocks is not None and sum(layout) != blocks:
        what = f"the numbers sum to {sum(layout)}, the model has {blocks} blocks"
        rules.refuse(["pipeline_layout"], what, f"Give numbers that sum to {blocks}")
