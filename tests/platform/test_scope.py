# SPDX-License-Identifier: Apache-2.0
"""On a CPU only megatron.core sees another torch: for everybody else torch is the same, to the identity of its objects.

Does not cover: what megatron.core does with its view (test_megatron_on_cpu.py, tests/distributed).
"""

from __future__ import annotations

from tests.platform.conftest import RunPython


def test_outside_of_megatron_torch_is_unchanged(run_python: RunPython) -> None:
    result = run_python(
        """
        import torch

        before = dict(vars(torch)), dict(vars(torch.cuda)), dict(vars(torch.Tensor)), dict(vars(torch.nn.Module))
        import omni_engine
        import megatron.core.optimizer, megatron.core.transformer.moe.moe_layer, megatron.core.dist_checkpointing

        def changed(old, now):
            return {name for name, value in old.items() if now.get(name) is not value}

        assert changed(before[0], vars(torch)) <= {"_dynamo", "_inductor"}, changed(before[0], vars(torch))
        assert not {name for name in changed(before[1], vars(torch.cuda)) if not name.startswith("_")}
        assert changed(before[2], vars(torch.Tensor)) <= {"type", "cuda", "record_stream"}
        assert changed(before[3], vars(torch.nn.Module)) <= {"cuda"}

        assert not torch.cuda.is_available()
        for call in (
            lambda: torch.zeros(1, device="cuda"),
            lambda: torch.tensor([1.0], device="cuda:0"),
            lambda: torch.cuda.current_device(),
            lambda: torch.cuda.Stream(),
            lambda: torch.ones(1).cuda(),
            lambda: torch.nn.Linear(1, 1).cuda(),
        ):
            try:
                call()
            except (AssertionError, RuntimeError):
                continue
            raise SystemExit("a CUDA call went through outside of megatron.core")
        assert torch.ones(1).type() == "torch.FloatTensor"
        assert torch.ones(1).type(torch.float64).dtype == torch.float64
        assert torch.device("cuda", 0).type == "cuda"

        # And inside it does: the same calls, made from a function of a megatron.core module.
        inside = vars(megatron.core.optimizer)
        exec("def inside(): return torch.zeros(1, device='cuda').cuda().type()", inside)
        assert inside["inside"]() == "torch.cuda.FloatTensor"
        """
    )
    assert result.returncode == 0, result.stdout + result.stderr
