# SPDX-License-Identifier: Apache-2.0
"""Invariant: the mapping table names every Hugging Face tensor of a model exactly once, and every parameter of a stage.

Does not cover the values (tests/models/test_qwen_image_parity.py, tests/checkpoint).
"""

from __future__ import annotations

import pytest
import torch

from omni_engine.models.mapping import ModelMapping, ParameterMapping, column
from omni_engine.models.qwen_image import MAPPING
from tests.tiny import make_transformer

pytestmark = pytest.mark.fast


def test_table_is_the_set_of_diffusers_tensors() -> None:
    assert ModelMapping(MAPPING, 3).source_names == set(make_transformer(layers=3).state_dict())


def test_a_name_in_two_entries_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        ModelMapping([*column("a", "x"), *column("b", "x")], 1)
    with pytest.raises(ValueError, match="twice"):
        ModelMapping([*column("a", "x"), *column("a", "y")], 1)


def test_a_parameter_without_an_entry_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no entry for b\.weight"):
        ModelMapping(column("a", "x"), 1).of({"a.weight": torch.zeros(1), "b.weight": torch.zeros(1)})


def test_fused_parts_are_views_in_the_order_of_the_sources() -> None:
    fused = torch.arange(6.0).view(6, 1)
    parts = ParameterMapping("qkv", ("q", "k", "v"), 0).split(fused)
    assert [part.flatten().tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    parts[1].zero_()
    assert fused.flatten().tolist() == [0, 1, 0, 0, 4, 5]
