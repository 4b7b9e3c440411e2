# SPDX-License-Identifier: Apache-2.0
"""Megatron-core as it comes does not run on a CPU: each of our patches is still needed.

Does not cover: the AdamW faults, which test_adamw_fix.py shows with and without their mend.
"""

from __future__ import annotations

from tests.platform.conftest import RunPython


def test_stock_megatron_still_needs_every_patch(run_python: RunPython) -> None:
    """Fails when a Megatron release makes a patch superfluous: then the patch is to be deleted."""
    result = run_python(
        """
        import torch
        from megatron.core import jit
        from megatron.core.optimizer import clip_grads, grad_scaler
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import moe_utils

        def fails(call):
            try:
                call()
            except (AssertionError, RuntimeError):
                return True
            return False

        superfluous = []
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.grad, parameter.main_grad = torch.ones(2), torch.ones(2)
        if not fails(lambda: grad_scaler.ConstantGradScaler(1.0)):  # makes a tensor on the device
            superfluous.append("torch_view")
        if not fails(lambda: clip_grads.clip_grad_by_total_norm_fp32([parameter], 1.0, 0.5)):
            superfluous.append("prepare (Tensor.type)")
        if jit.jit_fuser is jit.noop_decorator:
            superfluous.append("_turn_off_compile")
        if not fails(random._get_cuda_rng_state):
            superfluous.append("_use_host_generator")
        if not torch.is_tensor(moe_utils.maybe_move_tensor_to_cpu(torch.ones(1), as_numpy=True)):
            superfluous.append("_mend_moe_utils: maybe_move_tensor_to_cpu")
        if hasattr(moe_utils, "te_general_gemm"):
            superfluous.append("_mend_moe_utils: te_general_gemm")
        if superfluous:
            raise SystemExit(f"delete these, Megatron has mended them: {superfluous}")
        """
    )
    assert result.returncode == 0, result.stderr
