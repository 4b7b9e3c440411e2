# SPDX-License-Identifier: Apache-2.0
"""Rules of how a step is carried out: overlapped communication, offload, kernels of other packages, traces.

What a device can do is judged by its platform, when it has been chosen.
"""

from __future__ import annotations

import importlib.util

from omni_engine.arguments.rules import Rules


def check_execution(rules: Rules, world_size: int) -> None:
    """Combinations that Megatron cannot run, packages that are asked for and absent, traces that would be empty."""
    _check_overlap(rules)
    _check_offload(rules)
    _check_kernels(rules)
    _check_profile(rules, world_size)


def _check_overlap(rules: Rules) -> None:
    parallel = rules.settings.parallel
    if parallel.overlap_param_gather and not parallel.use_distributed_optimizer:
        rules.refuse(
            ["overlap_param_gather", "use_distributed_optimizer"],
            "every rank steps all weights, so there is nothing to gather",
            "Add --use-distributed-optimizer, or leave out --overlap-param-gather",
        )
    if parallel.overlap_param_gather and not parallel.overlap_grad_reduce:
        rules.refuse(
            ["overlap_param_gather", "overlap_grad_reduce"],
            "Megatron gathers weights by the buckets that overlapped reduction makes",
            "Add --overlap-grad-reduce, or leave out --overlap-param-gather",
        )
    if parallel.ddp_bucket_size is not None and not parallel.overlap_grad_reduce:
        rules.refuse(
            ["ddp_bucket_size", "overlap_grad_reduce"],
            "gradients that are reduced at the end are reduced in one piece",
            "Add --overlap-grad-reduce, or leave out --ddp-bucket-size",
        )


def _check_offload(rules: Rules) -> None:
    parallel = rules.settings.parallel
    if not parallel.optimizer_cpu_offload:
        return
    otherwise = "or leave out --optimizer-cpu-offload"
    if not parallel.use_distributed_optimizer:
        rules.refuse(
            ["optimizer_cpu_offload", "use_distributed_optimizer"],
            "Megatron offloads the distributed optimizer only",
            f"Add --use-distributed-optimizer (one process is enough), {otherwise}",
        )
    if not rules.settings.model.bf16:
        rules.refuse(
            ["optimizer_cpu_offload", "bf16"],
            "Megatron offloads what steps 16-bit weights only",
            f"Add --bf16, {otherwise}",
        )
    if importlib.util.find_spec("transformer_engine") is None:
        rules.refuse(
            ["optimizer_cpu_offload"],
            "the package transformer-engine, without which Megatron builds no offloaded optimizer, is not installed",
            f"Install it (pip install transformer-engine[pytorch], NVIDIA GPUs only), {otherwise}",
        )


def _check_kernels(rules: Rules) -> None:
    parallel = rules.settings.parallel
    engine = parallel.transformer_impl == "transformer_engine"
    if engine and importlib.util.find_spec("transformer_engine") is None:
        rules.refuse(
            ["transformer_impl"],
            "the package transformer-engine is not installed",
            "Install it (pip install transformer-engine[pytorch], NVIDIA GPUs only), or use --transformer-impl local",
        )
    fused = parallel.gradient_accumulation_fusion and not engine
    if fused and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        rules.refuse(
            ["gradient_accumulation_fusion", "transformer_impl"],
            "the module fused_weight_gradient_mlp_cuda, which apex builds, is not installed",
            "Build apex with its CUDA extensions (APEX_CPP_EXT=1 APEX_CUDA_EXT=1), use --transformer-impl "
            "transformer_engine, or leave it out",
        )


def _check_profile(rules: Rules, world_size: int) -> None:
    logging, train_iters = rules.settings.logging, rules.settings.training.train_iters
    if not logging.profile:
        return
    if logging.profile_step_start >= logging.profile_step_end:
        rules.refuse(
            ["profile_step_start", "profile_step_end"],
            "there is no iteration between them",
            f"Use an end of {logging.profile_step_start + 1} or more",
        )
    elif logging.profile_step_start >= train_iters:
        rules.refuse(
            ["profile_step_start", "train_iters"],
            f"the iterations are 0 to {train_iters - 1}, so the trace would be empty",
            f"Use a start of at most {train_iters - 1}",
        )
    absent = [rank for rank in logging.profile_ranks if rank >= world_size]
    if absent:
        rules.refuse(
            ["profile_ranks"],
            f"there is no rank {absent[0]} among {world_size} processes",
            f"Use ranks of 0 to {world_size - 1}",
        )
