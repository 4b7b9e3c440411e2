# SPDX-License-Identifier: Apache-2.0
"""Megatron's data-parallel wrapper, optimizer and learning-rate schedule around a policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from omni_engine.arguments import OptimizerSettings, ParallelSettings
from omni_engine.models.policy import Policy
from omni_engine.training.average import WeightAverage
from omni_engine.training.data_parallel import finish_param_sync, wrap_chunks
from omni_engine.training.replicas import ReplicaCheck


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

    Attributes:
        average: a moving average of the trained weights that steps with them; None until `keep_average`.
    """

    def __init__(self, policy: Policy, settings: OptimizerSettings, parallel: ParallelSettings, train_iters: int):
        self.policy = policy
        self.average: WeightAverage | None = None
        self.ddp = wrap_chunks(policy, parallel)
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
            overlap_param_gather=parallel.overlap_param_gather,
            optimizer_cpu_offload=parallel.optimizer_cpu_offload,
            optimizer_offload_fraction=parallel.optimizer_offload_fraction if parallel.optimizer_cpu_offload else 0.0,
            # The optimizer on the host takes its gradients by the way of this one; all of it stays float32.
            use_precision_aware_optimizer=parallel.optimizer_cpu_offload,
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
        self.check = ReplicaCheck(policy, parallel.check_param_sync_interval) if parallel.check_param_sync else None

    def keep_average(self, decay: float, interval: int) -> None:
        """Begin a moving average with the weights as they are. See `WeightAverage`."""
        self.average = WeightAverage(self.policy.trained_parameters(), decay, interval)

    def describe(self) -> str:
        """Which implementation of Adam steps the weights, and what of: for people."""
        inner = self.inner_optimizers[0]
        adam = type(inner.optimizer)
        return f"{adam.__module__}.{adam.__qualname__} in Megatron's {type(inner).__name__}"

    @property
    def inner_optimizers(self) -> list[Any]:
        """Megatron's optimizers, which it may chain."""
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

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
            TrainingError: Megatron refused the step, or --check-param-sync found a difference.
        """
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        succeeded, grad_norm, _ = self.optimizer.step()
        if not succeeded:
            raise TrainingError("Megatron's optimizer refused the step; the weights are unchanged")
        self.policy.version += 1
        if self.check is not None and self.check.is_due(self.policy.version):
            self.finish_param_sync()
            difference = self.check.difference()
            if difference is not None:
                raise TrainingError(
                    f"after optimizer step {self.policy.version} {difference}. Resume from an earlier checkpoint; if "
                    "the same rank differs again, suspect its device"
                )
        if self.average is not None and self.average.is_due(self.policy.version):
            self.finish_param_sync()
            self.average.update(self.policy.version)
        return StepResult(float(grad_norm), learning_rate)

    def finish_param_sync(self) -> None:
        """Make sure that this rank holds all of the newest weights. A collective over the replicas.

        With --overlap-param-gather a step leaves a rank with its own part of the weights; a forward pass gathers the
        rest as it goes. Whatever else reads weights calls this first.
        """
        finish_param_sync(self.ddp)

    def end_iteration(self) -> None:
        """Move the learning rate."""
        self.scheduler.step(1)
