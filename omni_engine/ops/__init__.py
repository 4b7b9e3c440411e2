# SPDX-License-Identifier: Apache-2.0
"""Tensor operations behind fixed names: what rollout and training call, whichever kernel computes it.

Today all of them are the plain torch reference; a fused kernel takes over a name here and is tested against it.
"""

from omni_engine.ops.reference import gaussian_kl, gaussian_log_prob, gaussian_mean, gaussian_step

__all__ = ["gaussian_kl", "gaussian_log_prob", "gaussian_mean", "gaussian_step"]
