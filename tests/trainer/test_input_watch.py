from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from testkit.training_harness import Noisy, Slow, run
from understudy.trainer import JsonLinesReporter
from understudy.trainer.data import DataPlan
from understudy.trainer.job import ProgressEvent
from understudy.trainer.loop import timed_next
from understudy.trainer.progress_meter import InputWatch


def watch(*, cache: bool, first_step: int = 0) -> InputWatch:
    plan = DataPlan(examples=100, global_batch_size=10, seed=0, shuffle_buffer=100, cache=cache, keep_remainder=False)
    return InputWatch(plan, first_step=first_step)


def event(step: int, waited: float, seconds: float = 10.0) -> ProgressEvent:
    return ProgressEvent(step=step, metrics={}, due=False, stopping=False, seconds=seconds, input_wait_seconds=waited)


def test_an_input_that_holds_training_up_is_told_once_with_what_helps(caplog: pytest.LogCaptureFixture) -> None:
    watching = watch(cache=False)
    for step in range(5, 60, 5):
        watching.saw(event(step, waited=5.0))
        assert bool(caplog.messages) == (step >= 20), "the first call traces the graph, then 30 s are judged"
    (message,) = caplog.messages
    assert message.startswith("training waited for its input 50% of the last 30 s: keep it in memory with --cache")
    assert "num_parallel_calls=tf.data.AUTOTUNE" in message


def test_an_input_that_keeps_up_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    watching = watch(cache=False)
    for step in range(5, 60, 5):
        watching.saw(event(step, waited=3.9))
    assert caplog.messages == []


def test_the_pass_that_fills_the_cache_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    watching = watch(cache=True, first_step=3)
    for step in range(4, 14):
        watching.saw(event(step, waited=9.0))
    for step in range(14, 60):
        watching.saw(event(step, waited=0.1))
    assert caplog.messages == []
    for step in range(60, 63):
        watching.saw(event(step, waited=9.0))
    (message,) = caplog.messages
    assert "--cache" not in message


def test_the_time_that_a_batch_lets_itself_be_waited_for_is_taken_in_the_graph() -> None:
    def wait(x: Any) -> Any:
        time.sleep(0.02)
        return x

    # Otherwise the next batch may be ready before anybody waits for it.
    unprefetched = tf.data.Options()
    unprefetched.experimental_optimization.inject_prefetch = False
    data = tf.data.Dataset.range(9).map(lambda x: tf.numpy_function(wait, [x], tf.int64))
    batches = iter(data.with_options(unprefetched))

    @tf.function  # type: ignore[untyped-decorator] # TensorFlow ships no types
    def take_three() -> Any:
        return [timed_next(batches) for _ in range(3)]

    taken = take_three()
    assert [int(number) for number, _ in taken] == [0, 1, 2]
    assert all(0.02 <= float(seconds) < 20.0 for _, seconds in taken)


def test_a_slow_input_shows_in_the_progress(tmp_path: Path) -> None:
    """A slow checkpoint lets the input run two batches ahead, of three between checkpoints."""
    slow, quick = (updates_of(experiment, tmp_path / type(experiment).__name__) for experiment in (Slow(), Noisy()))
    assert slow[1]["input_wait_share"] > 0.5
    assert seconds_waited(slow) > 0.3
    assert seconds_waited(quick) < seconds_waited(slow)


def updates_of(experiment: Noisy, run_dir: Path) -> list[dict[str, Any]]:
    """Train, and return the updates between checkpoints, after the first call: 3 steps of 24 examples each.

    Each example of a slow experiment takes 10 ms.
    """
    events = io.StringIO()
    run(experiment, run_dir, cache=False, shuffle_buffer=1, progress=JsonLinesReporter(events))
    return [event for event in map(json.loads, events.getvalue().splitlines()) if event["event"] == "advanced"][1:]


def seconds_waited(updates: list[dict[str, Any]]) -> float:
    return float(sum(update["input_wait_seconds"] for update in updates))
