# SPDX-License-Identifier: Apache-2.0
"""How the predictions of several guidance branches become one velocity."""

from __future__ import annotations

import torch
from torch import Tensor


def true_cfg(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance with the norm of the conditional prediction, as in QwenImagePipeline.

    conditional, unconditional: velocities [B, I, C] of one floating dtype; result of that shape and dtype, in which a
    token's norm over C is that of `conditional`. A token whose combination is exactly zero stays zero (diffusers: NaN).
    Raises ValueError for scale <= 1, where the pipeline runs the conditional branch alone, or for unequal shapes.
    """
    if not scale > 1.0:
        raise ValueError(f"true_cfg needs a scale above 1, got {scale}: up to 1 use the conditional branch alone")
    if conditional.shape != unconditional.shape or conditional.dtype != unconditional.dtype:
        raise ValueError(
            f"the branches differ: conditional {conditional.dtype} {list(conditional.shape)}, "
            f"unconditional {unconditional.dtype} {list(unconditional.shape)}"
        )
    combined: Tensor = unconditional + scale * (conditional - unconditional)
    conditional_norm = torch.linalg.vector_norm(conditional, dim=-1, keepdim=True)
    combined_norm = torch.linalg.vector_norm(combined, dim=-1, keepdim=True)
    vanished = combined_norm == 0
    rescale: Tensor = conditional_norm / combined_norm.masked_fill(vanished, 1.0)
    return combined * rescale
