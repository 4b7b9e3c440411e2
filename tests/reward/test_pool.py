# SPDX-License-Identifier: Apache-2.0
"""Invariant: a reward is the weighted sum of the values that the scorers gave this very picture with its own prompt, or
it is None with a reason. Whatever a scorer does (dies, hangs, raises, returns rubbish), no sample gets a made-up value,
the samples next to it keep theirs, `result` returns, and no process is left.

Not covered: a worker that holds its interpreter lock for ever while the trainer dies by SIGKILL (it cannot notice), and
machines without POSIX sockets.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omni_engine.arguments import RewardSettings
from omni_engine.reward import Reward, RewardError, RewardPool, prompt_check

pytestmark = pytest.mark.fast

FAKE = "tests.reward.fake_scorers:Fake"
HALF = "tests.reward.fake_scorers:Half"


def settings(workers: int = 1, timeout: float = 60.0, retries: int = 1) -> RewardSettings:
    return RewardSettings(reward_workers=workers, reward_timeout=timeout, reward_retries=retries)


def pictures(count: int) -> np.ndarray:
    """Picture i is filled with i + 1, never 0: a made-up 0.0 is then always seen."""
    return np.broadcast_to(np.arange(1, count + 1, dtype=np.uint8)[:, None, None, None], (count, 4, 6, 3))


def prompts_with(count: int, faults: dict[int, str]) -> list[str]:
    return [faults.get(i, f"prompt {i}") for i in range(count)]


def values(rewards: list[Reward]) -> list[float | None]:
    return [reward.value for reward in rewards]


def expected(count: int, failed: set[int]) -> list[float | None]:
    return [None if i in failed else float(i + 1) for i in range(count)]


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process}/stat")  # an ended child that nobody has waited for yet is not alive
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool([FAKE], [1.0], settings(workers=2)) as pool:
        yield pool


def test_every_picture_gets_the_value_for_its_own_prompt_in_order(pool: RewardPool) -> None:
    handles = [pool.submit(pictures(count), prompts_with(count, {})) for count in (50, 1, 16, 33)]
    for handle, count in zip(handles, (50, 1, 16, 33), strict=True):
        rewards = handle.result()
        assert values(rewards) == expected(count, set())
        assert [reward.texts["fake"] for reward in rewards] == prompts_with(count, {})
        assert all(reward.failure is None for reward in rewards)


def test_a_batch_may_be_empty_and_is_copied(pool: RewardPool, tmp_path: Path) -> None:
    assert pool.submit(np.empty((0, 4, 6, 3), np.uint8), []).result() == []
    images = pictures(3).copy()
    handle = pool.submit(images, [f"wait for:{tmp_path}/go"] * 3)
    images[:] = 99
    (tmp_path / "go").touch()
    assert values(handle.result()) == expected(3, set())


def test_submit_returns_while_the_scores_are_still_to_come(pool: RewardPool, tmp_path: Path) -> None:
    handle = pool.submit(pictures(2), [f"wait for:{tmp_path}/go"] * 2)
    assert not handle.done()
    (tmp_path / "go").touch()
    assert values(handle.result()) == expected(2, set())
    assert handle.done()


@pytest.mark.parametrize(
    ("images", "prompts"),
    [
        (pictures(3).astype(np.float32), ["a"] * 3),
        (pictures(3), ["a"] * 2),
        (pictures(3)[0], ["a"] * 4),
        (pictures(3).transpose(0, 3, 1, 2), ["a"] * 3),
    ],
)
def test_pictures_of_another_form_are_refused(pool: RewardPool, images: np.ndarray, prompts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"uint8 pictures \[B, H, W, 3\] and B prompts"):
        pool.submit(images, prompts)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("crash", "the worker process ended with code 3"),
        ("raise", "ZeroDivisionError: asked to raise"),
        ("fail", "asked to fail"),
        ("value:nan", "the score is nan"),
        ("value:inf", "the score is inf"),
    ],
)
def test_a_fault_fails_its_own_sample_only(pool: RewardPool, fault: str, reason: str) -> None:
    rewards = pool.submit(pictures(20), prompts_with(20, {5: fault})).result()
    assert values(rewards) == expected(20, {5})
    assert rewards[5].failure is not None and reason in rewards[5].failure
    assert "fake" not in rewards[5].parts


def test_an_honest_zero_stays_a_zero(pool: RewardPool) -> None:
    (reward,) = pool.submit(pictures(1), ["value:0.0"]).result()
    assert reward.value == 0.0 and reward.failure is None


@pytest.mark.parametrize("fault", ["crash once", "raise once", "fail once"])
def test_a_fault_that_passes_is_mended_by_a_retry(pool: RewardPool, tmp_path: Path, fault: str) -> None:
    before = pool.counters()
    rewards = pool.submit(pictures(20), prompts_with(20, {5: f"{fault}:{tmp_path}/seen"})).result()
    assert values(rewards) == expected(20, set())
    assert pool.counters()["retries"] > before["retries"] and pool.counters()["failures"] == before["failures"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("too few", "gave 0 results for 1 pictures"), ("text for a number", "'0.5': it must be a number")],
)
def test_a_broken_contract_is_an_error_and_not_a_failure(pool: RewardPool, prompt: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        pool.submit(pictures(1), [prompt]).result()
    assert values(pool.submit(pictures(1), ["next"]).result()) == [1.0]


def test_a_hang_ends_at_the_timeout_and_a_second_try_may_succeed(tmp_path: Path) -> None:
    with RewardPool([FAKE], [1.0], settings(timeout=1.0)) as pool:
        assert values(pool.submit(pictures(2), ["a", f"hang once:{tmp_path}/seen"]).result()) == [1.0, 2.0]
        rewards = pool.submit(pictures(18), prompts_with(18, {17: "hang"})).result()
        assert values(rewards) == expected(18, {16, 17})  # the two of one task
        assert rewards[17].failure == "fake: no answer within 1 s"
        assert pool.counters() == {
            "retries": 4,
            "failures": 2,
            "timeouts": 3,
            "restarts": 2,
        }  # the last worker is still dead


def test_a_worker_that_died_idle_is_replaced_without_a_failure() -> None:
    with RewardPool([FAKE], [1.0], settings(retries=0)) as pool:
        process = int(values(pool.submit(pictures(1), ["process"]).result())[0] or 0)
        os.kill(process, signal.SIGKILL)
        while pool._workers[0].is_running():
            time.sleep(0.01)
        assert values(pool.submit(pictures(1), ["a"]).result()) == [1.0]
        assert pool.counters() == {"retries": 0, "failures": 0, "timeouts": 0, "restarts": 1}


def test_weights_combine_scorers_and_watchers_only_watch() -> None:
    watcher = "tests.reward.fake_scorers:Picky"
    with pytest.raises(RewardError, match="two of the scorers have one name"):
        RewardPool([FAKE], [1.0], settings(), watchers=[watcher])
    with RewardPool([HALF], [3.0], settings(retries=0), watchers=[FAKE]) as pool:
        plain, watched = (pool.submit(pictures(2), ["a", "fail"], watch=watch).result() for watch in (False, True))
        assert values(plain) == values(watched) == [1.5, 3.0]
        assert plain[0].parts == {"half": 0.5} and watched[0].parts == {"half": 0.5, "fake": 1.0}
        assert watched[1].parts == {"half": 1.0} and watched[1].failure == "fake: asked to fail"
    with RewardPool([FAKE, HALF], [1.0, -4.0], settings(retries=0)) as pool:
        rewards = pool.submit(pictures(3), ["a", "fail", "fail half"]).result()
        assert values(rewards) == [1.0 - 2.0, None, None]
        assert rewards[1].parts == {"half": 1.0} and rewards[2].failure == "half: asked to fail"


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("tests.reward.fake_scorers:Unloadable", "cannot be loaded: FileNotFoundError: judge.safetensors is missing"),
        ("tests.reward.fake_scorers:CannotScore", "cannot score a blank picture: no licence"),
        ("tests.reward.fake_scorers:DiesAtStart", "did not start: the worker process ended with code 7"),
    ],
)
def test_a_scorer_that_cannot_work_is_told_at_the_start(scorer: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        RewardPool([scorer], [1.0], settings())


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("orc", "unknown reward 'orc': choose from ocr, ocr_v4, or give your own as package.module:Class"),
        ("no_such_package.judge:Judge", "cannot import no_such_package.judge .* install what it needs"),
        ("tests.reward.fake_scorers:Judge", "fake_scorers.py has no class Judge"),
    ],
)
def test_a_name_without_a_scorer_is_told_before_any_process_starts(scorer: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        prompt_check([scorer])


def test_scorers_and_weights_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="a weight for each"):
        RewardPool([FAKE], [1.0, 2.0], settings())


def test_prompts_are_checked_by_every_scorer_that_has_a_check() -> None:
    check = prompt_check([FAKE, "tests.reward.fake_scorers:Picky"])
    check("short")
    with pytest.raises(ValueError, match="longer than 10"):
        check("not short at all")


def test_a_worker_imports_neither_torch_nor_the_main_module(pool: RewardPool) -> None:
    (reward,) = pool.submit(pictures(1), ["modules"]).result()
    loaded = {module.partition(".")[0] for module in reward.texts["fake"].split()}
    assert "numpy" in loaded and not loaded & {"torch", "megatron", "pytest", "onnxruntime"}


def test_an_exception_in_the_caller_ends_the_workers_even_in_the_middle_of_a_score(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), RewardPool([FAKE], [1.0], settings(timeout=600.0)) as pool:
        process = int(values(pool.submit(pictures(1), ["process"]).result())[0] or 0)
        handle = pool.submit(pictures(1), [f"hang once:{tmp_path}/hangs"])
        while not (tmp_path / "hangs").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert not is_alive(process)
    with pytest.raises(RewardError, match="the reward pool is closed"):
        handle.result()
    with pytest.raises(RewardError, match="the reward pool is closed"):
        pool.submit(pictures(1), ["a"])


TRAINER = f"""
import os, sys, time
import numpy
from omni_engine.arguments import RewardSettings
from omni_engine.reward import RewardPool

end, hangs = sys.argv[1:]
pool = RewardPool([{FAKE!r}], [1.0], RewardSettings())
images = numpy.ones((1, 4, 6, 3), numpy.uint8)
worker = int(pool.submit(images, ["process"]).result()[0].value)
if end == "killed in a score":
    pool.submit(images, ["hang once:" + hangs])
    while not os.path.exists(hangs):
        time.sleep(0.01)
if end == "killed while a fork holds its socket" and os.fork() == 0:
    time.sleep(20)
    os._exit(0)
print(worker, flush=True)
if end != "ends without close":
    time.sleep(1000)
"""


@pytest.mark.parametrize("end", ["ends without close", "killed in a score", "killed while a fork holds its socket"])
def test_no_worker_outlives_its_trainer(end: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", TRAINER, end, str(tmp_path / "hangs")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert trainer.stdout is not None
    worker = int(trainer.stdout.readline())
    if end != "ends without close":
        trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 15
    while is_alive(worker):
        assert time.monotonic() < deadline, f"worker {worker} is still there"
        time.sleep(0.05)
