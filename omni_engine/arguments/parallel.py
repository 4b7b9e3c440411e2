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
    use_distributed_optimizer: bool = flag(
        False, source="Megatron", help="Shard the optimizer state and the main parameters over the data-parallel ranks."
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

    def data_parallel_size(self, world_size: int) -> int:
        """Model replicas among `world_size` processes (checked by `validate`: the division is exact)."""
        return world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)
