# SPDX-License-Identifier: Apache-2.0
"""Settings of saving, resuming and exporting."""

from __future__ import annotations

from dataclasses import dataclass

from omni_engine.arguments.flag import flag


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoint: what is written and what is resumed from."""

    save: str | None = flag(
        None, source="Megatron", help="Folder of the checkpoints. Not given: RUNS_DIR/RUN_NAME/checkpoints."
    )
    load: str | None = flag(
        None, source="Megatron", help="Checkpoint folder (a --save of another run, or the same) to resume from."
    )
    save_interval: int = flag(
        50,
        unit="iterations",
        at_least=0,
        source="Megatron",
        help="A checkpoint is written after every so many iterations and after the last one. 0: never.",
    )
    export_hf: str | None = flag(
        None, help="Folder that the trained pipeline is written to at the end, in the Hugging Face format."
    )
