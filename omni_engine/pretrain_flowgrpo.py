# SPDX-License-Identifier: Apache-2.0
"""Entry point: `torchrun --nproc-per-node N -m omni_engine.pretrain_flowgrpo --config FILE.yaml [flags]`."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from omni_engine.arguments import Settings, SettingsError, load_settings, where_to_continue
from omni_engine.platform import PlatformError, get_platform, select_platform

EXIT_SETTINGS, EXIT_FAILED = 2, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the whole job in this process. Returns the exit status."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        settings = load_settings(argv)
        faults = select_platform(settings.parallel.platform).validate(settings.parallel)
        if faults:
            raise PlatformError("\n".join(faults))
    except (SettingsError, PlatformError) as error:
        if rank == 0:
            print(error, file=sys.stderr, flush=True)
        return EXIT_SETTINGS
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        try:
            _train(settings)
        except Exception as error:
            _leave(_failure(error, rank), settings)
    except KeyboardInterrupt as stopped:
        _leave(
            f"rank {rank} was stopped by {stopped}: another process of the run has ended, or the run was told to stop",
            settings,
        )
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    """A signal to end, as torchrun sends it when another process has failed: go through the clean-up, and say so."""
    signal.signal(number, signal.SIG_IGN)  # once is enough: the clean-up must come to its end
    raise KeyboardInterrupt(signal.Signals(number).name)


def _train(settings: Settings) -> None:
    # Megatron tells at its import which optional packages it does without.
    warnings.filterwarnings("ignore", module="megatron")
    # Imported here: importing Megatron-core needs the platform, which the settings choose.
    from omni_engine.parallel import destroy, initialize
    from omni_engine.training.loop import train
    from omni_engine.training.run import build_run

    platform = get_platform()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    platform.set_device(local_rank)
    platform.share_cores(settings.parallel.cpu_threads, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    platform.seed(settings.training.seed)
    groups = initialize(settings.parallel, settings.training.seed)
    run = build_run(settings, groups)
    try:
        if groups.rank == 0:
            told = f"Layout: {groups.describe()} on {platform.name}\nOptimizer: {run.optimizer.describe()}"
            run.logger.message(f"{settings.describe()}\n{told}")
        train(run)
        run.finish()
    except BaseException:
        with suppress(Exception):  # what broke the run may break this too; the first fault is the one to tell
            run.close()
        raise
    run.close()
    destroy()


def _leave(told: str, settings: Settings) -> NoReturn:
    """Say what happened and what is left, and end this process."""
    print(f"{told}\n{where_to_continue(settings)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # A peer may be waiting in a collective that will never be answered: leave without the clean-up that waits too.
    os._exit(EXIT_FAILED)


def _failure(error: Exception, rank: int) -> str:
    """What failed. An error that explains itself is told alone, any other with its traceback."""
    if get_platform().is_lost_peer(error):
        return (
            f"rank {rank} lost another process of the run, which has ended or does not answer ({error}); what that one "
            "had to say stands elsewhere in the log"
        )
    told = f"error on rank {rank}: {error}"
    return told if _explains_itself(error) else f"{traceback.format_exc()}{told}"


def _explains_itself(error: Exception) -> bool:
    """Whether the message says what, where and the remedy: errors of ours, and what our own code raises of Python's."""
    from omni_engine.checkpoint import CheckpointError
    from omni_engine.reward import RewardError
    from omni_engine.training.logging import LoggingError
    from omni_engine.training.optimizer import TrainingError

    if isinstance(error, CheckpointError | RewardError | LoggingError | TrainingError):
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_ours = str(frame.f_globals.get("__name__")).startswith("omni_engine.")
    return is_ours and isinstance(error, FileNotFoundError | ValueError)


if __name__ == "__main__":
    sys.exit(main())
