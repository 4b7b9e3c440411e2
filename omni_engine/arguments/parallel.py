# SPDX-License-Identifier: Apache-2.0
"""Settings of the parallel layout and of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from omni_engine.arguments.flag import flag


@dataclass(frozen=True)
class ParallelSettings:
    """Parallel: how the model and the samples are spread over the processes."""

    tensor_model_parallel_size: int = flag(
        1,
        unit="ranks",
        at_least=1,
        source="Megatron",
        help="Ranks that share the heads and the MLP of every block (TP).",
    )
    pipeline_model_parallel_size: int = flag(
        1, unit="ranks", at_least=1, source="Megatron", help="Stages that the blocks are cut into (PP)."
    )
    sequence_parallel: bool = flag(
        False, source="Megatron", help="Shard the tokens between the TP ranks outside attention and MLP. Needs TP > 1."
    )
    ulysses_degree: int = flag(
        1,
        unit="ranks",
        at_least=1,
        source="DeepSpeed-Ulysses, USP",
        help="Ranks that share the tokens of a sample outside attention and its heads inside (all-to-all). Times "
        "--ring-degree, this is Megatron's context-parallel size.",
    )
    ring_degree: int = flag(
        1,
        unit="ranks",
        at_least=1,
        source="Ring Attention, USP",
        help="Ranks, or groups of Ulysses ranks, that share the tokens of a sample and pass keys and values around.",
    )
    ring_attention_kernel: str = flag(
        "auto",
        choices=("auto", "math"),
        help="Kernel of a ring step. auto: the device's flash attention. math: plain matrix products, for checks.",
    )
    num_virtual_stages_per_pipeline_rank: int = flag(
        1,
        unit="stages",
        at_least=1,
        source="Megatron",
        help="Stages that each pipeline rank holds, interleaved (VPP): a smaller bubble, more messages. Needs PP > 1.",
    )
    pipeline_layout: tuple[int, ...] = flag(
        (),
        unit="blocks",
        at_least=1,
        help="Blocks of every stage in the order in which they run (PP x VPP numbers). none: cut by work and memory.",
    )
    use_distributed_optimizer: bool = flag(
        False, source="Megatron", help="Shard the optimizer state and the main parameters over the data-parallel ranks."
    )
    overlap_grad_reduce: bool = flag(
        False,
        source="Megatron",
        help="Reduce gradients over the replicas bucket by bucket while the last micro-batch's backward pass goes on.",
    )
    overlap_param_gather: bool = flag(
        False,
        source="Megatron",
        help="Gather the stepped weights bucket by bucket while the next forward pass goes on. Needs "
        "--use-distributed-optimizer and --overlap-grad-reduce.",
    )
    ddp_bucket_size: int | None = flag(
        None,
        unit="parameters",
        at_least=1,
        source="Megatron",
        help="Size of a bucket of --overlap-grad-reduce. Not given: 40 million, or a million a data-parallel rank if "
        "that is more. Pipeline stages after the first, and virtual stages after a rank's first, have one bucket.",
    )
    optimizer_cpu_offload: bool = flag(
        False,
        source="Megatron",
        help="Keep optimizer state and float32 main weights in host memory and step there. Needs --bf16, "
        "--use-distributed-optimizer, transformer-engine and a device that has a memory of its own.",
    )
    optimizer_offload_fraction: float = flag(
        1.0,
        above=0,
        at_most=1,
        source="Megatron",
        help="Part of the weights that --optimizer-cpu-offload steps on the host.",
    )
    check_param_sync: bool = flag(
        True,
        help="After optimizer steps compare a checksum of every weight over the ranks that must hold it alike, and "
        "stop the run where they differ.",
    )
    check_param_sync_interval: int = flag(
        10,
        unit="optimizer steps",
        at_least=1,
        help="Steps from one --check-param-sync to the next; the first step is checked always. 1: after every step, "
        "which leaves --overlap-param-gather nothing to hide behind.",
    )
    transformer_impl: str = flag(
        "local",
        choices=("local", "transformer_engine"),
        source="Megatron",
        help="Where parallel linear layers and affine norms come from: Megatron-core, or transformer-engine (NVIDIA "
        "only). Attention is ours in both.",
    )
    gradient_accumulation_fusion: bool = flag(
        False,
        source="Megatron",
        help="Add weight gradients to the float32 buffer inside the matrix product. Needs transformer-engine or apex's "
        "fused_weight_gradient_mlp_cuda.",
    )
    platform: str = flag(
        "auto", choices=("auto", "cpu", "cuda", "npu"), help="Kind of device. auto: the first kind that is present."
    )
    distributed_timeout_minutes: int = flag(
        10, unit="minutes", at_least=1, source="Megatron", help="A collective that waits longer than this is an error."
    )
    cpu_threads: int = flag(
        0,
        unit="threads",
        at_least=0,
        help="Compute threads of each process on the host. 0: the processes of a machine share its cores evenly.",
    )

    @property
    def context_parallel_size(self) -> int:
        """Ranks that share the tokens of a sample."""
        return self.ulysses_degree * self.ring_degree

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one replica of the policy."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Model replicas among `world_size` processes (checked by `validate`: the division is exact)."""
        return world_size // self.model_parallel_size
