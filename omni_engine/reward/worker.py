# SPDX-License-Identifier: Apache-2.0
"""The process that holds the scorers, and the messages between it and the pool.

A fresh interpreter started by its own command, not `multiprocessing`: a fork would copy a process full of threads and
device memory, and a spawn imports the parent's main module again, here the whole trainer. Messages are JSON, pixels
follow as raw bytes; nothing is unpickled.

    pool -> worker   {"scorers": [...], "picture_size": [H, W]}                    once
    worker -> pool   {"names": [...]} or {"error": reason}                         once
    pool -> worker   {"scorer": index, "prompts": [...], "shape": [...]}, pixels   any number of times
    worker -> pool   {"results": [...]} or {"exception": reason} or {"error": reason}

"error" is a broken contract and stops the run; an exception fails the pictures of the message.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from .base import Failure, RewardError, Score, Scorer, scorer_class

Message = dict[str, Any]
CHECK_PROMPT = 'A blank picture that should read "check"'
_ORPHAN_POLL_SECONDS = 1.0
_ORPHAN_GRACE_SECONDS = 2.0


def send(connection: Connection, message: Message, pixels: np.ndarray | None = None) -> None:
    """Send a message, and the C-contiguous uint8 `pixels` whose "shape" it names."""
    connection.send_bytes(json.dumps(message).encode())
    if pixels is not None:
        connection.send_bytes(pixels.data.cast("B"))


def receive(connection: Connection) -> tuple[Message, np.ndarray | None]:
    """The next message, and its pixels if it names a "shape". Raises EOFError once the other end is closed."""
    message: Message = json.loads(connection.recv_bytes())
    if "shape" not in message:
        return message, None
    pixels = np.empty(message["shape"], dtype=np.uint8)
    connection.recv_bytes_into(pixels.data.cast("B"))
    return message, pixels


def main(descriptor: int) -> None:
    """Serve the pool at the other end of this socket until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the pool ends its workers
    connection = Connection(descriptor)
    requests: queue.SimpleQueue[tuple[Message, np.ndarray | None] | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests, os.getppid()), daemon=True).start()
    scorers: list[Scorer] = []
    while (request := requests.get()) is not None:
        message, pixels = request
        if pixels is None:
            scorers, answer = _load(message["scorers"], message["picture_size"])
        else:
            answer = _answer(scorers[message["scorer"]], pixels, message["prompts"])
        try:
            send(connection, answer)
        except OSError:  # the pool closed or died meanwhile
            return


def _listen(connection: Connection, requests: queue.SimpleQueue[Any], parent: int) -> None:
    """Hand requests over; end the process when the pool is gone, even in the middle of a score that never returns."""
    try:
        while os.getppid() == parent:  # a fork of the trainer may hold its end of the socket open after its death
            if connection.poll(_ORPHAN_POLL_SECONDS):
                requests.put(receive(connection))
    except (EOFError, OSError):
        pass
    requests.put(None)
    time.sleep(_ORPHAN_GRACE_SECONDS)
    os._exit(1)


def _load(names: list[str], picture_size: list[int]) -> tuple[list[Scorer], Message]:
    """The scorers, each tried on a blank picture of `picture_size`."""
    scorers: list[Scorer] = []
    for name in names:
        try:
            scorer = scorer_class(name)()
            blank = np.full((1, *picture_size, 3), 255, dtype=np.uint8)
            (result,) = _checked(scorer.name, scorer.score(list(blank), [CHECK_PROMPT]), 1)
        except RewardError as error:
            return [], {"error": str(error)}
        except Exception as error:
            return [], {"error": f"reward {name!r} cannot be loaded: {_reason(error)}"}
        if isinstance(result, Failure):
            return [], {"error": f"reward {name!r} cannot score a blank picture: {result.reason}"}
        scorers.append(scorer)
    return scorers, {"names": [scorer.name for scorer in scorers]}


def _answer(scorer: Scorer, pixels: np.ndarray, prompts: list[str]) -> Message:
    try:
        results = _checked(scorer.name, scorer.score(list(pixels), prompts), len(prompts))
    except RewardError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"exception": _reason(error)}
    return {"results": [_encoded(result) for result in results]}


def _checked(name: str, results: Any, count: int) -> list[Score | Failure]:
    """The results, if the scorer kept its contract. A value that is not finite becomes a Failure."""
    if not isinstance(results, list) or not all(isinstance(result, Score | Failure) for result in results):
        raise RewardError(f"scorer {name!r} must return a list of Score and Failure, and gave {results!r:.200}")
    if len(results) != count:
        raise RewardError(f"scorer {name!r} gave {len(results)} results for {count} pictures: give one a picture")
    return [_finite(name, result) if isinstance(result, Score) else result for result in results]


def _finite(name: str, score: Score) -> Score | Failure:
    given: object = score.value  # a scorer may be anybody's code
    if not isinstance(given, numbers.Real):
        raise RewardError(f"scorer {name!r} gave the value {given!r:.200}: it must be a number")
    value = float(given)
    return Score(value, str(score.text)) if math.isfinite(value) else Failure(f"the score is {value}")


def _encoded(result: Score | Failure) -> Message:
    if isinstance(result, Failure):
        return {"failure": str(result.reason)}
    return {"value": result.value, "text": result.text}


def _reason(error: Exception) -> str:
    """One line for the pool; the whole story goes to the log."""
    traceback.print_exception(error, file=sys.stderr)
    return f"{type(error).__name__}: {error}"
