# SPDX-License-Identifier: Apache-2.0
"""Megatron's data-parallel wrapper, optimizer and learning-rate schedule around a policy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from omni_engine.arguments import OptimizerSettings, ParallelSettings
from omni_engine.models.policy import Policy


class TrainingError(RuntimeError):
    """Training cannot go on; the message says what was seen, where, and the remedy."""


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did."""

    grad_norm: float
    learning_rate: float


class PolicyOptimizer:
    """Steps a policy's weights. Wraps the policy's stage for data-parallel gradient reduction in float32.

    The learning rate moves once an iteration, after its last update.
    """

    def __init__(self, policy: Policy, settings: OptimizerSettings, parallel: ParallelSettings, train_iters: int):
        self.policy = policy
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=parallel.use_distributed_optimizer
        )
        self.ddp = [DistributedDataParallel(policy.config, ddp_config, chunk) for chunk in policy.chunks]
        policy.models = list(self.ddp)
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            # An infinite limit still measures the norm.
            clip_grad=settings.clip_grad or math.inf,
            bf16=policy.config.bf16,
            params_dtype=policy.config.params_dtype,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
        )
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(config, self.ddp)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.min_lr,
            lr_warmup_steps=settings.lr_warmup_iters,
            lr_decay_steps=settings.lr_decay_iters or train_iters,
            lr_decay_style=settings.lr_decay_style,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        policy.config.grad_scale_func = self.optimizer.scale_loss
        policy.config.finalize_model_grads_func = finalize_model_grads

    def zero_grad(self) -> None:
        """Clear the gradient buffers before an update."""
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def gradients_are_finite(self) -> bool:
        """Whether this rank's reduced gradients are all finite. One NaN or infinity makes the sum one."""
        buffers = [buffer for chunk in self.ddp for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return all(math.isfinite(float(buffer.grad_data.sum())) for buffer in buffers)

    def step(self) -> StepResult:
        """Clip, step, and count a new version of the weights. The gradients are known to be finite.

        Raises:
            TrainingError: Megatron refused the step.
        """
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        succeeded, grad_norm, _ = self.optimizer.step()
        if not succeeded:
            raise TrainingError("Megatron's optimizer refused the step; the weights are unchanged")
        self.policy.version += 1
        return StepResult(float(grad_norm), learning_rate)

    def end_iteration(self) -> None:
        """Move the learning rate."""
        self.scheduler.step(1)
