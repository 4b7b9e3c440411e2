# SPDX-License-Identifier: Apache-2.0
"""torchrun with a plain last word: `python -m omni_engine.launch OPTIONS -m omni_engine.pretrain_flowgrpo FLAGS`.

torchrun itself ends a failed job with a traceback of its own code. Here the last lines say which process ended and
how (one that the system kills cannot say so itself), and from which checkpoint the run continues.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from omni_engine.arguments import SettingsError, parse_settings, where_to_continue


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job to its end. Returns 0, or the status of the process that failed first (128 + signal if killed)."""
    arguments = parse_args(list(sys.argv[1:] if argv is None else argv))
    try:
        run(arguments)
        return 0
    except ChildFailedError as error:
        told, status = _how_it_failed(error)
    except SignalException as stopped:
        told, status = f"The run was stopped by {stopped.sigval.name}.", 128 + stopped.sigval
    print(f"{told} {_continuing(arguments.training_script_args)}", file=sys.stderr, flush=True)
    return status


def _how_it_failed(error: ChildFailedError) -> tuple[str, int]:
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return f"The run has failed: rank {rank} ended with status {failure.exitcode}; see above.", failure.exitcode
    number = -failure.exitcode
    told = f"The run has failed: rank {rank} (process {failure.pid}) was killed by {_name(number)}"
    if number == signal.SIGKILL:
        told += ", which the system does when memory runs out (the kernel's log tells), or somebody did"
    return f"{told}.", 128 + number


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _continuing(flags: Sequence[str]) -> str:
    try:
        return where_to_continue(parse_settings(flags))
    except SettingsError:
        return ""  # the processes have told


if __name__ == "__main__":
    sys.exit(main())
