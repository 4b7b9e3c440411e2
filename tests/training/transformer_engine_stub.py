# SPDX-License-Identifier: Apache-2.0
"""Run by test_transformer_engine.py: the engine on a stand-in for the package transformer-engine.

    transformer_engine_stub.py layers|adam|offload FOLDER

FOLDER holds a model. The stand-in has the classes that Megatron-core's wrappers derive from and its fused Adam, with
the arguments that transformer-engine 2 documents, and computes with torch in one process. So what is shown is that ours
calls Megatron's wrappers as those want it, finds weights under the names of the mapping table, and takes a fused Adam
where there is one; nothing is shown of transformer-engine itself. For the offloaded optimizer, tensors say that they
lie on a device, as Megatron asks of those that it offloads: what is shown is that gradients, float32 weights, moments
and step counts find their way, through a resume too; nothing of a device's copies, streams and pinned memory.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F


class Linear(torch.nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = None,
    ):
        assert tp_size == 1 and parallel_mode in ("column", "row")
        super().__init__()
        self.in_features, self.out_features, self.use_bias, self.tp_size = in_features, out_features, bias, tp_size
        self.parallel_mode, self.fused = parallel_mode, fuse_wgrad_accumulation
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype))
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        return F.linear(inp, self.weight, self.bias)


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = None,
    ):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=params_dtype))

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(inp, self.weight.shape, self.weight, self.eps)


class FusedAdam(torch.optim.Optimizer):
    """AdamW that counts its steps in the parameter groups, as the fused ones do."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ):
        assert adam_w_mode and bias_correction
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                state, grad = self.state[parameter], parameter.grad
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
                root = (state["exp_avg_sq"] / (1 - second**step)).sqrt_().add_(group["eps"])
                parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - first**step))


class FusedSGD(torch.optim.SGD):
    """Imported beside it."""


class _Package(types.ModuleType):
    """A module that has whatever class or module it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (torch.nn.Module,), {}) if name[0].isupper() else _Package(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes any module of the package."""

    def __init__(self, has_optimizers: bool):
        """Without the fused optimizers Megatron goes on with torch's."""
        self.contents: dict[str, dict[str, Any]] = {
            "transformer_engine": {"__version__": "2.1.0"},
            "transformer_engine.pytorch": {"Linear": Linear, "RMSNorm": RMSNorm},
        }
        self.optimizers = {"FusedAdam": FusedAdam, "FusedSGD": FusedSGD} if has_optimizers else {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "transformer_engine" or ".optimizers." in name:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        if spec.name != "transformer_engine.pytorch.optimizers":
            return _Package(spec.name)
        # It has nothing else: for multi-tensor kernels Megatron has stand-ins of its own.
        module = types.ModuleType(spec.name)
        module.__dict__.update(self.optimizers)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(self.contents.get(module.__name__, {}))


def layers(folder: Path) -> None:
    """A policy of transformer-engine's layers samples and trains as one of ours, bit for bit."""
    from omni_engine.arguments import ParallelSettings
    from omni_engine.parallel import initialize
    from omni_engine.parallel import transformer_engine as ours
    from tools.bench.tiny_engine import Setup, build_engine

    groups = initialize(ParallelSettings(), seed=0)
    found = []
    for impl in ("local", "transformer_engine"):
        fused = impl == "transformer_engine"  # needs nothing of apex there
        parallel = ParallelSettings(transformer_impl=impl, gradient_accumulation_fusion=fused)
        engine = build_engine(folder, groups, Setup(parallel=parallel))
        samples = engine.sample()
        metrics = engine.updater.run(samples, engine.scored())
        found.append((samples.segments["image"].x_next, metrics, engine.weights()))
    block = engine.policy.stage.blocks["0"].image
    assert isinstance(block.qkv, ours.ColumnLinear) and isinstance(block.out, ours.RowLinear)
    assert isinstance(engine.policy.stage.text_norm, RMSNorm)
    assert block.qkv.fused and not engine.policy.stage.blocks["0"].image.modulation.gradient_accumulation_fusion
    local, other = found
    assert torch.equal(local[0], other[0])
    assert local[1] == other[1] and local[1]["optimizer/grad_norm"] > 0
    assert all(torch.equal(weight, other[2][path]) for path, weight in local[2].items())


def adam(folder: Path) -> None:
    """A fused Adam is used, said, saved and resumed: the resumed run goes on bit for bit."""
    from omni_engine.arguments import ParallelSettings
    from omni_engine.checkpoint import load_checkpoint, save_checkpoint
    from omni_engine.parallel import initialize
    from tests.small_training import build_trainee

    groups = initialize(ParallelSettings(), seed=0)
    for distributed in (False, True):
        for bf16 in (False, True):
            parallel = ParallelSettings(use_distributed_optimizer=distributed)
            trainee = build_trainee(folder, groups, parallel, bf16=bf16)
            assert "FusedAdam" in trainee.optimizer.describe()
            trainee.train(0, 1)
            save = folder / f"saved-{distributed}-{bf16}"
            save_checkpoint(save, 2, trainee.policy, trainee.optimizer, {})
            trainee.train(2, 3)
            resumed = build_trainee(folder, groups, parallel, bf16=bf16)
            load_checkpoint(save, resumed.policy, resumed.optimizer)
            resumed.train(2, 3)
            weights = resumed.weights()
            assert all(torch.equal(weight, weights[path]) for path, weight in trainee.weights().items())


class HostTensor(torch.Tensor):
    """A copy in host memory; what is made of it lies there too."""

    is_cuda = False  # type: ignore[assignment]


def offload(folder: Path) -> None:
    """Steps on the host are those of the device, and a resumed run goes on bit for bit."""
    from omni_engine.arguments import ParallelSettings
    from omni_engine.checkpoint import load_checkpoint, save_checkpoint
    from omni_engine.parallel import initialize
    from tests.small_training import build_trainee

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        return self.detach().clone().as_subclass(HostTensor)

    def is_on_device(self: torch.Tensor) -> bool:
        return str(sys._getframe(1).f_globals["__name__"]).startswith("megatron.core.optimizer.")

    move = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if args == ("cuda",) else move(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[assignment, method-assign]
    torch.Tensor.is_cuda = property(is_on_device)  # type: ignore[assignment, method-assign]
    torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment, method-assign]
    whole = ParallelSettings(use_distributed_optimizer=True)
    groups = initialize(whole, seed=0)
    expected = build_trainee(folder, groups, whole, bf16=True)
    expected.train(0, 1, 2, 3)
    for fraction in (1.0, 0.5):
        parallel = replace(whole, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
        trainee = build_trainee(folder, groups, parallel, bf16=True)
        trainee.train(0, 1)
        (hybrid,) = (inner.optimizer for inner in trainee.optimizer.inner_optimizers)
        kinds = {type(adam) for adam in hybrid.sub_optimizers}
        assert kinds == {torch.optim.AdamW} | ({FusedAdam} if fraction < 1 else set())
        save = folder / f"saved-{fraction}"
        save_checkpoint(save, 2, trainee.policy, trainee.optimizer, {})
        trainee.train(2, 3)
        # Adam on the host rounds in another order, which may show in the last bit of bf16, 2^-8.
        assert error(trainee.weights(), expected.weights()) < 2**-8
        resumed = build_trainee(folder, groups, parallel, bf16=True)
        load_checkpoint(save, resumed.policy, resumed.optimizer)
        resumed.train(2, 3)
        assert error(resumed.weights(), trainee.weights()) == 0.0


def error(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest of the relative errors of all weights."""
    return max(float((ours[path] - weight).norm() / weight.norm()) for path, weight in theirs.items())


if __name__ == "__main__":
    what, place = sys.argv[1:]
    sys.meta_path.insert(0, _Finder(has_optimizers=what != "layers"))
    {"layers": layers, "adam": adam, "offload": offload}[what](Path(place))
    # `destroy` would have to be imported above, before the stand-in is in place.
    torch.distributed.destroy_process_group()
    print("done")
