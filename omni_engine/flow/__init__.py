# SPDX-License-Identifier: Apache-2.0
"""The mathematics of flow sampling: schedules, step coefficients, noise, guidance, and the trajectories they make.

Knows nothing of models, devices or parallel layouts. Everything here is a function of its arguments.
"""

from omni_engine.flow.coefficients import (
    KL_VARIANCES,
    SDE_TYPES,
    StepCoefficients,
    coefficient_table,
    log_prob_convention,
    require_log_prob,
    step_coefficients,
)
from omni_engine.flow.guidance import true_cfg
from omni_engine.flow.noise import INITIAL_LATENT, STEP_NOISE, philox_normal
from omni_engine.flow.schedule import Schedule, SchedulerConfig, flow_match_schedule
from omni_engine.flow.trajectory import FlowSegment, Samples
from omni_engine.flow.window import sde_window

__all__ = [
    "INITIAL_LATENT",
    "KL_VARIANCES",
    "SDE_TYPES",
    "STEP_NOISE",
    "FlowSegment",
    "Samples",
    "Schedule",
    "SchedulerConfig",
    "StepCoefficients",
    "coefficient_table",
    "flow_match_schedule",
    "log_prob_convention",
    "philox_normal",
    "require_log_prob",
    "sde_window",
    "step_coefficients",
    "true_cfg",
]
