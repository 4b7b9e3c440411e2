# SPDX-License-Identifier: Apache-2.0
"""Megatron-core on two CPU processes trains as torch does in one, and resumes from its own checkpoint bit for bit.

Data parallel with the distributed optimizer and clipping against torch's AdamW; save and load by dist_checkpointing
(which starts a process by "spawn"); tensor parallel layers with sequence parallelism against plain linear layers.
Does not cover: pipeline stages, our own layers and our checkpoints, which have tests of their own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers import run_torchrun

if TYPE_CHECKING:
    import torch

STEPS_BEFORE, STEPS = 3, 5
LEARNING_RATE, CLIP = 0.01, 0.2
SHARDINGS = ("fully_reshardable", "dp_reshardable")


def test_two_processes_train_as_one_and_resume_bit_for_bit(tmp_path: Path) -> None:
    result = run_torchrun(__file__, 2, str(tmp_path), env={"OMNI_PLATFORM": "cpu"}, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("passed") == 2 * (2 * len(SHARDINGS) + 1), result.stdout


# ---- below runs in each of the two processes. torch and Megatron are imported late, because the process that the
# checkpoint writer spawns imports this module, too.


class _Training:
    """A small network under Megatron's DDP and distributed optimizer; each rank sees its half of a batch of 8."""

    def __init__(self, dtype: torch.dtype) -> None:
        import torch
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        bf16 = dtype == torch.bfloat16
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=bf16, params_dtype=dtype)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.module = _network().to(dtype)
        self.model = DistributedDataParallel(config, ddp, self.module)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=0.0,
            clip_grad=CLIP,
            bf16=bf16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        self.dtype = dtype

    def steps(self, first: int, end: int) -> list[float]:
        import torch.distributed as dist

        norms = []
        for number in range(first, end):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            mine = _batch(number)[dist.get_rank() :: dist.get_world_size()].to(self.dtype)
            (self.model(mine).float() ** 2).mean().backward()
            self.model.finish_grad_sync()
            _, norm, _ = self.optimizer.step()
            norms.append(norm)
        return norms

    def sharded_state(self, is_loading: bool, sharding: str) -> dict[str, Any]:
        import torch.distributed as dist
        from megatron.core.dist_checkpointing import ShardedTensor

        model = {
            name: ShardedTensor.from_rank_offsets(name, parameter, replica_id=(0, 0, dist.get_rank()))
            for name, parameter in self.module.named_parameters()
        }
        metadata = {"distrib_optim_sharding_type": sharding}
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)}


def _network() -> torch.nn.Module:
    import torch

    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.GELU(), torch.nn.Linear(33, 5))


def _batch(number: int) -> torch.Tensor:
    import torch

    return torch.randn(8, 7, generator=torch.Generator().manual_seed(number))


def _train_in_one_process() -> tuple[list[torch.Tensor], list[float]]:
    import torch

    network = _network()
    adamw = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    norms = []
    for number in range(STEPS):
        adamw.zero_grad()
        (network(_batch(number)) ** 2).mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP).item())
        adamw.step()
    return [parameter.detach() for parameter in network.parameters()], norms


def _check_training(dtype: torch.dtype, sharding: str, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    unbroken = _Training(dtype)
    norms = unbroken.steps(0, STEPS_BEFORE)
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(unbroken.sharded_state(False, sharding), str(folder))
    norms += unbroken.steps(STEPS_BEFORE, STEPS)

    expected, expected_norms = _train_in_one_process()
    exact = dtype == torch.float32
    torch.testing.assert_close(norms, expected_norms, rtol=1e-4 if exact else 0.05, atol=0.0)
    for ours, theirs in zip(unbroken.module.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=0.0, atol=LEARNING_RATE * (1e-3 if exact else 1.0))

    resumed = _Training(dtype)
    for parameter in resumed.module.parameters():
        parameter.data.fill_(7.0)
    state = dist_checkpointing.load(resumed.sharded_state(True, sharding), str(folder))
    resumed.module.load_state_dict(state["model"])
    resumed.optimizer.load_state_dict(state["optimizer"])
    resumed.steps(STEPS_BEFORE, STEPS)
    for ours, theirs in zip(resumed.module.parameters(), unbroken.module.parameters(), strict=True):
        assert ours.equal(theirs), "the resumed run differs from the unbroken one"


def _check_tensor_parallel() -> None:
    """Column then row parallel with sequence parallelism: S=6 tokens, B=2, 8 -> 12 -> 8 features."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.model_parallel_config import ModelParallelConfig

    rank, group = dist.get_rank(), parallel_state.get_tensor_model_parallel_group()
    config = ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    first, second = torch.randn(12, 8), torch.randn(8, 12)
    dist.broadcast(first, 0)
    dist.broadcast(second, 0)
    kwargs: dict[str, Any] = {"config": config, "init_method": torch.nn.init.zeros_, "bias": False}
    column = tensor_parallel.ColumnParallelLinear(8, 12, gather_output=False, **kwargs)
    row = tensor_parallel.RowParallelLinear(12, 8, input_is_parallel=True, skip_bias_add=False, **kwargs)
    with torch.no_grad():
        column.weight.copy_(first.chunk(2, 0)[rank])
        row.weight.copy_(second.chunk(2, 1)[rank])

    x = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(1))
    mine = x.chunk(2, 0)[rank].clone().requires_grad_()
    y = row(torch.tanh(column(mine)[0]))[0]
    (y**2).sum().backward()

    x.requires_grad_()
    first.requires_grad_()
    expected = torch.tanh(x @ first.T) @ second.T
    (expected**2).sum().backward()
    assert x.grad is not None and first.grad is not None
    torch.testing.assert_close(y, expected.chunk(2, 0)[rank])
    torch.testing.assert_close(mine.grad, x.grad.chunk(2, 0)[rank], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(column.weight.grad, first.grad.chunk(2, 0)[rank], rtol=1e-4, atol=1e-4)
    assert dist.get_world_size(group) == 2


def main(folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from omni_engine.platform import get_platform

    dist.init_process_group(get_platform().dist_backend)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        for sharding in SHARDINGS:
            _check_training(dtype, sharding, folder / f"{dtype}_{sharding}")
            print("passed", dtype, sharding, flush=True)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    _check_tensor_parallel()
    print("passed tensor parallel", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    import omni_engine  # noqa: F401

    main(Path(sys.argv[1]))
