# SPDX-License-Identifier: Apache-2.0
"""Check a command line without starting anything: `WORLD_SIZE=8 python -m omni_engine.arguments FLAGS`.

Prints what an iteration comes to, or every fault; the exit status is 2 when the settings are refused.
"""

from __future__ import annotations

import os
import sys

from omni_engine.arguments.faults import SettingsError
from omni_engine.arguments.parser import load_settings


def main() -> int:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        settings = load_settings(world_size=world_size)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    rollout, parallel, updates = settings.rollout, settings.parallel, settings.algorithm.updates_per_rollout
    replicas = parallel.data_parallel_size(world_size)
    print(
        f"settings are sound: {world_size} processes = {replicas} data-parallel x "
        f"{parallel.pipeline_model_parallel_size} pipeline x {parallel.tensor_model_parallel_size} tensor; "
        f"an iteration is {rollout.samples_per_step} samples in {updates} updates, "
        f"{rollout.samples_per_step // (updates * replicas * settings.optimizer.micro_batch_size)} micro-batches each"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
