# SPDX-License-Identifier: Apache-2.0
"""Invariant: on a stand-in for transformer-engine (transformer_engine_stub.py says what of it is real) its layers give
the numbers of ours, its fused Adam is taken, named, saved and resumed, and the optimizer offloaded to the host steps as
one that is not and resumes bit for bit. Without the package its layers are refused by name.

Not covered: transformer-engine itself, apex, any GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from omni_engine.parallel import ColumnParallelLinear, RowParallelLinear, layer_spec
from omni_engine.parallel.norm import RMSNorm
from tests.engine_parts import make_folder
from tests.helpers import run_torchrun

STUB = Path(__file__).with_name("transformer_engine_stub.py")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["layers", "adam", "offload"])
def test_it_is_used_where_it_is_there(what: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, layers=2)
    result = run_torchrun(STUB, 1, what, str(folder), env={"OMNI_PLATFORM": "cpu"}, timeout=600)
    assert result.returncode == 0, result.stderr[-6000:]
    assert result.stdout.endswith("done\n")


@pytest.mark.fast
def test_our_layers_are_the_default_and_absent_ones_are_refused_by_name() -> None:
    def config(impl: str) -> TransformerConfig:
        return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, transformer_impl=impl)

    spec = layer_spec(config("local"))
    assert (spec.column_linear, spec.row_linear, spec.rms_norm) == (ColumnParallelLinear, RowParallelLinear, RMSNorm)
    with pytest.raises(ValueError, match=r"cannot be imported.*--transformer-impl local"):
        layer_spec(config("transformer_engine"))
