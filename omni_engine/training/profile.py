# SPDX-License-Identifier: Apache-2.0
"""`--profile`: a trace of some iterations by torch's profiler, in which phases, stages, micro-batches and blocks have
names. Open it in https://ui.perfetto.dev or chrome://tracing.

Ranges lie inside each other: a phase (`update`), Megatron's schedule (`forward-backward`, and its messages between
stages), a pass (`stage 1 backward, micro-batch 0`), a block (`block 7 backward`). Below them torch links each operation
of a backward pass to that of the forward pass it belongs to (the arrows `fwdbwd`). A block that is recomputed shows its
forward range once more inside its backward range. Outside of the traced iterations nothing of this is in a run's way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from omni_engine.arguments import LoggingSettings
from omni_engine.models.policy import Policy
from omni_engine.platform import get_platform
from omni_engine.training.logging.files import explained, make_folder
from omni_engine.training.optimizer import PolicyOptimizer

NamedRange = Callable[[str], AbstractContextManager[Any]]


class Profiler:
    """Traces the iterations that the settings name, on the ranks that they name."""

    def __init__(
        self,
        settings: LoggingSettings,
        folder: Path,
        policy: Policy,
        optimizer: PolicyOptimizer,
        tell: Callable[[str], None],
    ):
        """`folder`: of the run; `tell` is given what to say when a trace is written."""
        self.settings, self.policy, self.optimizer, self.tell = settings, policy, optimizer, tell
        self.rank = policy.groups.rank
        self.file = folder / "profile" / f"rank{self.rank}.json.gz"
        self._trace: torch.profiler.profile | None = None
        self._names = ExitStack()

    @property
    def is_wanted(self) -> bool:
        """Whether this rank writes a trace."""
        return self.settings.profile and self.rank in self.settings.profile_ranks

    def phase_range(self) -> NamedRange:
        """What names the phases; nothing where none is traced."""
        return get_platform().named_range if self.is_wanted else nullcontext

    @contextmanager
    def iteration(self, index: int) -> Iterator[None]:
        """Run an iteration, counted from 0, and begin and end the trace around it where it is time.

        Raises:
            LoggingError: the trace cannot be written.
        """
        end = self.settings.profile_step_end
        if self.is_wanted and self._trace is None and self.settings.profile_step_start <= index < end:
            self._begin()
        yield
        if index + 1 == end:
            self.close()

    def _begin(self) -> None:
        make_folder(self.file.parent)
        self._names.enter_context(named_passes(self.policy, self.optimizer))
        self._trace = torch.profiler.profile(activities=get_platform().profiler_activities())
        self._trace.start()

    def close(self) -> None:
        """End the trace, if one is under way, and write it. Safe to call twice.

        Raises:
            LoggingError: it cannot be written.
        """
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        get_platform().synchronize()
        trace.stop()
        self._names.close()
        with explained("write the trace", self.file):
            trace.export_chrome_trace(str(self.file))
        self.tell(f"Trace of rank {self.rank}: {self.file} (open it in https://ui.perfetto.dev)")


@contextmanager
def named_passes(policy: Policy, optimizer: PolicyOptimizer) -> Iterator[None]:
    """Name everything that the policy's schedules and blocks do while the context is open."""
    named_range = get_platform().named_range
    configs = [policy.config, *(inner.config for inner in optimizer.inner_optimizers)]
    timers = RangeTimers(policy, named_range)
    undo = []
    for config in configs:
        config.timers = timers
    for chunk in policy.chunks:
        for index, block in chunk.blocks.items():
            undo.append(name_block(block, f"block {index}", named_range))
    try:
        yield
    finally:
        for config in configs:
            config.timers = None
        for restore in undo:
            restore()


class RangeTimers:
    """Stands where Megatron's code starts and stops its timers, and opens and closes ranges of their names.

    `forward-compute` and `backward-compute`, which are of one micro-batch, are given those of stage and micro-batch.
    """

    def __init__(self, policy: Policy, named_range: NamedRange):
        self.named_range = named_range
        self.groups = policy.groups
        self._open: dict[str, list[AbstractContextManager[Any]]] = {}
        self._count = {"forward": 0, "backward": 0}

    def __call__(self, name: str, log_level: int | None = None) -> _RangeTimer:
        return _RangeTimer(self, name)

    def start(self, name: str) -> None:
        if name == "forward-backward":
            self._count = {"forward": 0, "backward": 0}
        direction = name.removesuffix("-compute")
        opened = self.named_range(self._of_pass(direction) if direction in self._count else name)
        opened.__enter__()
        self._open.setdefault(name, []).append(opened)

    def stop(self, name: str) -> None:
        self._open[name].pop().__exit__(None, None, None)

    def _of_pass(self, direction: str) -> str:
        """Name of the next pass. Interleaved stages take turns of one group of micro-batches each, as many as there are
        pipeline ranks; backward, the last stage comes first (`get_schedule_table` in Megatron's schedules)."""
        count, groups = self._count[direction], self.groups
        self._count[direction] += 1
        turn, place = divmod(count, groups.pp_size) if groups.vpp_size > 1 else (0, count)
        group, chunk = divmod(turn, groups.vpp_size)
        if direction == "backward":
            chunk = groups.vpp_size - 1 - chunk
        stage = chunk * groups.pp_size + groups.pp_rank
        return f"stage {stage} {direction}, micro-batch {group * groups.pp_size + place}"


class _RangeTimer:
    def __init__(self, timers: RangeTimers, name: str):
        self.timers, self.name = timers, name

    def start(self, barrier: bool = False) -> None:
        self.timers.start(self.name)

    def stop(self, barrier: bool = False) -> None:
        self.timers.stop(self.name)


def name_block(block: torch.nn.Module, name: str, named_range: NamedRange) -> Callable[[], None]:
    """Name a block's forward and backward passes. Returns: what takes the names away again."""
    forward = block.forward

    @functools.wraps(forward)
    def named_forward(*args: Any, **kwargs: Any) -> Any:
        with named_range(f"{name} forward"):
            return forward(*args, **kwargs)

    opened: list[AbstractContextManager[Any]] = []

    def begin(*_: Any) -> None:
        opened.append(named_range(f"{name} backward"))
        opened[-1].__enter__()

    def end(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    block.forward = named_forward
    hooks = [block.register_full_backward_pre_hook(begin), block.register_full_backward_hook(end)]

    def restore() -> None:
        del block.forward
        for hook in hooks:
            hook.remove()

    return restore
