# SPDX-License-Identifier: Apache-2.0
"""Entry point: `torchrun --nproc-per-node N -m omni_engine.pretrain_flowgrpo --config FILE.yaml [flags]`."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from omni_engine.arguments import Settings, SettingsError, load_settings
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
    try:
        _train(settings)
    except KeyboardInterrupt:
        return EXIT_FAILED
    except Exception as error:
        _report(error, settings, rank)
        # A peer may be waiting in a collective that will never be answered: leave without the clean-up that waits too.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_FAILED)
    return 0


def _train(settings: Settings) -> None:
    # Imported here: importing Megatron-core needs the platform, which the settings choose.
    from omni_engine.parallel import destroy, initialize
    from omni_engine.training.loop import train
    from omni_engine.training.run import build_run

    warnings.filterwarnings("ignore", module="megatron")
    platform = get_platform()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    platform.set_device(local_rank)
    platform.share_cores(settings.parallel.cpu_threads, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    platform.seed(settings.training.seed)
    parallel = settings.parallel
    groups = initialize(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        settings.training.seed,
        parallel.distributed_timeout_minutes,
    )
    run = build_run(settings, groups)
    try:
        if groups.rank == 0:
            run.logger.message(settings.describe() + f"\nLayout: {groups.describe()} on {platform.name}")
        train(run)
        run.finish()
    finally:
        run.close()
    destroy()


def _report(error: Exception, settings: Settings, rank: int) -> None:
    """Say what failed and what is left. Errors of ours explain themselves; others need their traceback."""
    from omni_engine.checkpoint import CheckpointError, latest_iteration

    lines = []
    if not isinstance(error, _explained()):
        lines.append(traceback.format_exc())
    lines.append(f"error on rank {rank}: {error}")
    try:
        last = latest_iteration(settings.save_dir)
        lines.append(f"The last whole checkpoint is iteration {last}: continue with --load {settings.save_dir}")
    except CheckpointError:
        lines.append(f"There is no checkpoint in {settings.save_dir} yet.")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _explained() -> tuple[type[Exception], ...]:
    """Errors that say what, where and the remedy."""
    from omni_engine.checkpoint import CheckpointError
    from omni_engine.reward import RewardError
    from omni_engine.training.logging import LoggingError
    from omni_engine.training.optimizer import TrainingError

    return (CheckpointError, RewardError, LoggingError, TrainingError, FileNotFoundError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
