"""Which batches run on the event loop's thread."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.engine_calls import predict_on
from understudy.evaluator.assembly.component_options import engine_settings
from understudy.evaluator.batching.batch_runner import LONGEST_SECONDS, InlineJudge, Stopwatch
from understudy.evaluator.batching.engine import Engine, EngineSettings
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.types import FutureSink, Prediction

TIMEOUT = 60.0
GROUP = ("serving", ("tokens", "int32", (8,)))
LONG_GROUP = ("serving", ("tokens", "int32", (4096,)))


def feed(judge: InlineJudge, count: int, seconds: float, *, inline: bool = False) -> None:
    for _ in range(count):
        judge.observe(GROUP, 4, seconds, inline=inline)


def hash_until(stop: threading.Event) -> None:
    """Use a core without the GIL."""
    while not stop.is_set():
        hashlib.sha256(bytes(1 << 22))


@pytest.fixture
def judge() -> InlineJudge:
    return InlineJudge()


def test_a_shape_is_tried_on_the_devices_thread_first(judge: InlineJudge) -> None:
    feed(judge, 7, 1e-4)
    assert not judge.is_brief(GROUP, 4)
    feed(judge, 1, 1e-4)
    assert judge.is_brief(GROUP, 4)


def test_nothing_is_concluded_from_one_shape_for_another(judge: InlineJudge) -> None:
    feed(judge, 16, 1e-4)
    assert [judge.is_brief(GROUP, rows) for rows in (2, 3, 4, 5)] == [False, True, True, False]
    assert not judge.is_brief(LONG_GROUP, 4)


def test_one_brief_batch_among_long_ones_is_not_enough(judge: InlineJudge) -> None:
    feed(judge, 14, 5e-3)
    feed(judge, 2, 1e-4)
    assert not judge.is_brief(GROUP, 4)


def test_batches_that_waited_for_the_gil_do_not_count_against_a_shape(judge: InlineJudge) -> None:
    feed(judge, 9, 5e-3)
    feed(judge, 7, 1e-4)
    assert judge.is_brief(GROUP, 4)


def test_a_shape_that_is_sometimes_long_leaves_the_loop_each_time_for_longer(judge: InlineJudge) -> None:
    stalls, inline_batches = 0, 0
    for index in range(10_000):
        inline = judge.is_brief(GROUP, 4)
        seconds = 0.02 if index % 10 == 0 else 1e-4
        stalls += inline and seconds > LONGEST_SECONDS
        inline_batches += inline
        judge.observe(GROUP, 4, seconds, inline=inline)
    assert 0 < stalls <= 16
    assert inline_batches < 500


def test_a_single_long_batch_is_forgiven(judge: InlineJudge) -> None:
    feed(judge, 8, 1e-4)
    feed(judge, 1, 0.15, inline=True)
    feed(judge, 100, 1e-4, inline=True)
    assert judge.is_brief(GROUP, 4)


def test_a_batch_whose_core_was_given_to_others_meanwhile_took_its_own_cpu_time() -> None:
    """As beside Envoy, whose threads belong to the same process."""
    others_stop = threading.Event()
    other = threading.Thread(target=hash_until, args=(others_stop,))
    other.start()
    try:
        own = min(Stopwatch().own_seconds(elapsed=1.0) for _ in range(20))  # each may wait for the GIL
    finally:
        others_stop.set()
        other.join(TIMEOUT)
    assert own < LONGEST_SECONDS


def test_a_batch_that_waited_for_other_threads_took_the_elapsed_time() -> None:
    stopwatch = Stopwatch()
    threading.Event().wait(0.003)
    elapsed = stopwatch.seconds()
    assert elapsed >= 0.003
    assert stopwatch.own_seconds(elapsed) == elapsed


def test_a_shape_that_is_no_longer_brief_goes_back_to_the_devices_thread(judge: InlineJudge) -> None:
    feed(judge, 8, 1e-4)
    feed(judge, 32, 1e-4, inline=True)
    feed(judge, 17, 1.5e-3, inline=True)
    assert not judge.is_brief(GROUP, 4)


@pytest.mark.parametrize(
    ("devices", "chosen", "inline"),
    [
        (["/job:localhost/replica:0/task:0/device:CPU:0"], True, True),
        (["/job:localhost/replica:0/task:0/device:CPU:0", "/device:CPU:1"], True, True),
        (["/job:localhost/replica:0/task:0/device:GPU:0"], True, False),
        (["/device:CPU:0"], False, False),
    ],
)
def test_gpus_and_the_switch_keep_batches_off_the_loop(
    tmp_path: Path,
    devices: list[str],
    chosen: bool,  # noqa: FBT001 - a parameter of the test
    inline: bool,  # noqa: FBT001 - likewise
) -> None:
    settings = engine_settings(EvaluatorSettings(state_dir=tmp_path, inline_batches=chosen, max_batch_size=7), devices)
    assert settings.inline_batches is inline
    assert settings.overlap_batches is any("GPU" in device for device in devices)
    assert settings.max_batch_size == 7 * len(devices), "it is for each replica"


class Sequences:
    """A model with an open axis: computes for as long as its sequences are, and notes what it held the loop for."""

    step = 1

    def __init__(self) -> None:
        self.held: list[float] = []
        self.loop_thread = threading.get_ident()

    @property
    def slot(self) -> Sequences:
        return self

    def launch(self, inputs: Any) -> Callable[[], dict[str, Any]]:
        result = self.forward(inputs)
        return lambda: result

    def forward(self, inputs: Any) -> dict[str, Any]:
        until = time.thread_time() + 1e-5 * inputs["x"].shape[1]
        while time.thread_time() < until:
            pass
        if threading.get_ident() == self.loop_thread:
            self.held.append(1e-5 * inputs["x"].shape[1])
        return {"y": inputs["x"]}

    def try_out(self) -> None:
        """Succeed."""

    def release(self) -> None:
        """Nothing is counted here."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(EngineSettings(), SilentObserver())
    yield engine
    engine.close(TIMEOUT)


def submit(engine: Engine, model: Sequences, length: int) -> Future[Prediction]:
    token: Future[Prediction] = Future()
    engine.submit(
        {"x": np.zeros((1, length), np.float32)},
        borrow=lambda: model,
        key="serving",
        deadline=None,
        token=token,
        sink=FutureSink(),
        dispatch=False,
    )
    return token


def test_a_long_sequence_among_short_ones_never_holds_the_loop(engine: Engine) -> None:
    async def drive() -> Sequences:
        model, done = Sequences(), 0
        while done < 300 or len(model.held) <= 100:
            token = submit(engine, model, 10 if done % 10 else 1000)
            engine.dispatch()
            await asyncio.wrap_future(token)
            done += 1
        return model

    model = asyncio.run(asyncio.wait_for(drive(), TIMEOUT))
    assert max(model.held) <= LONGEST_SECONDS


def test_the_engine_may_be_woken_while_its_thread_takes_note_of_batches(engine: Engine) -> None:
    model = Sequences()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        pending = []
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            pending += [
                predict_on(engine, {"x": np.zeros((rows, 1), np.float32)}, borrow=lambda: model, key=1)
                for rows in (1, 2, 3)
            ]
            for _ in range(20):
                engine.dispatch()
                engine.check_admission(time.monotonic() + TIMEOUT)
            for future in pending[:-3]:
                future.result(TIMEOUT)
            del pending[:-3]
    finally:
        sys.setswitchinterval(interval)
    for future in pending:
        future.result(TIMEOUT)
