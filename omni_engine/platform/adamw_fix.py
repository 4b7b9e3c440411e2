# SPDX-License-Identifier: Apache-2.0
"""Mends Megatron-core's DistributedOptimizer where it keeps the step count of torch's Adam wrongly.

Why: with neither TransformerEngine nor Apex installed Megatron falls back to `torch.optim.AdamW`, whose step count is a
tensor in the state of each parameter. DistributedOptimizer treats it wrongly in four places, on any device:
  1. `state_dict()` asserts that there is a step count, so an optimizer that has not stepped can neither be saved nor
     build the sharded state dict that loading needs;
  2. loading "fully_reshardable" parameter state leaves the step count out, then looks it up: KeyError 'step';
  3. `load_state_dict()` gives one step tensor to all parameters, so that every later step advances it once per
     parameter: the bias correction is wrong from then on, silently;
  4. loading "dp_reshardable" parameter state copies the step count of the *fresh* optimizer over the one that was just
     loaded (and, for float32 parameters, fails without no_grad: it writes in place into a view of a leaf).
Versions: all four in megatron-core 0.16.1 and in 0.19.2.
No longer needed when: `test_adamw_fix.py` finds that a fault does not show without the mend.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

MODULE = "megatron.core.optimizer.distrib_optimizer"


def mend(module: ModuleType) -> None:
    """Mend the DistributedOptimizer of `module` in place, unless a fused Adam (with its own step count) is used."""
    if module.HAVE_APEX_OR_TE:
        return
    optimizer_class: Any = module.DistributedOptimizer
    optimizer_class.state_dict = _state_dict_before_first_step(optimizer_class.state_dict)
    optimizer_class.load_state_dict = _load_state_dict_unshared(optimizer_class.load_state_dict)
    optimizer_class._set_main_param_and_optimizer_states = _set_states_but_step(
        optimizer_class._set_main_param_and_optimizer_states
    )


def _state_dict_before_first_step(original: Any) -> Any:
    """Fault 1: give the parameters the state that their first step would begin with."""

    def state_dict(self: Any) -> Any:
        if isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    if not self.optimizer.state[param]:
                        self.optimizer.state[param] = {
                            "step": torch.tensor(0.0),
                            "exp_avg": torch.zeros_like(param),
                            "exp_avg_sq": torch.zeros_like(param),
                        }
        return original(self)

    return state_dict


def _load_state_dict_unshared(original: Any) -> Any:
    """Fault 3: a step tensor of its own for each parameter."""

    def load_state_dict(self: Any, state_dict: Any) -> Any:
        result = original(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()
        return result

    return load_state_dict


def _set_states_but_step(original: Any) -> Any:
    """Faults 2 and 4: the step count is the one `load_state_dict` took from the parameter groups, and stays so."""

    @torch.no_grad()
    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        group_index, group_order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group_index]["params"][group_order]
        state = self.optimizer.state[main_param]
        if "step" in state:
            tensors = {**tensors, "step": state["step"]}
        return original(self, model_param, tensors)

    return set_main_param_and_optimizer_states
