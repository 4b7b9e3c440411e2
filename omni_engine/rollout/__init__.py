# SPDX-License-Identifier: Apache-2.0
"""Sampling: what an iteration asks for, and the engines that answer with trajectories and pictures."""

from omni_engine.rollout.conditions import PromptEncoder
from omni_engine.rollout.engine import RolloutChunk, RolloutEngine, RolloutRequest
from omni_engine.rollout.native import NativeRollout
from omni_engine.rollout.plan import IterationPlan, micro_batches, plan_iteration

__all__ = [
    "IterationPlan",
    "NativeRollout",
    "PromptEncoder",
    "RolloutChunk",
    "RolloutEngine",
    "RolloutRequest",
    "micro_batches",
    "plan_iteration",
]
