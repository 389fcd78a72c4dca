from __future__ import annotations

import io
import json
import math

import pytest

from understudy.trainer import JsonLinesReporter, LineReporter, ProgressReporter, ProgressUpdate, TrainingPlan
from understudy.trainer.data import DataPlan
from understudy.trainer.job import ProgressEvent
from understudy.trainer.progress_meter import ProgressMeter

PLAN = TrainingPlan(
    experiment="digits",
    strategy="mirrored",
    replicas=2,
    task="worker 1",
    first_step=10,
    steps=100,
    steps_per_epoch=5,
    global_batch_size=32,
    devices=("device=GPU:1 kind=GPU memory_mib=81559",),
)


class Clock:
    """Shows the time it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def update(step: int = 20, loss: float = 0.5, remaining_seconds: float | None = 75.0) -> ProgressUpdate:
    return ProgressUpdate(
        step=step,
        steps=100,
        epoch=4.0,
        metrics={"loss": loss},
        examples_per_second=1234.5,
        remaining_seconds=remaining_seconds,
        input_wait_seconds=0.5,
        input_wait_share=0.25,
    )


def event(step: int, *, seconds: float, waited: float = 1.0) -> ProgressEvent:
    return ProgressEvent(
        step=step, metrics={"loss": 1.0}, due=False, stopping=False, seconds=seconds, input_wait_seconds=waited
    )


def tell_everything(reporter: ProgressReporter) -> None:
    reporter.started(PLAN)
    reporter.advanced(update())
    reporter.published(20, {"loss": 0.5})
    reporter.finished(100)


def test_people_get_plain_lines() -> None:
    stream = io.StringIO()
    tell_everything(LineReporter(stream))
    assert stream.getvalue().splitlines() == [
        "training digits as worker 1: 100 steps of 32 examples, mirrored, 2 replicas, resuming after step 10",
        "  device=GPU:1 kind=GPU memory_mib=81559",
        "step 20/100  epoch 4.0  loss 0.5000  1234 examples/s  1:15 left",
        "published step 20  loss 0.5000",
        "finished at step 100",
    ]


@pytest.mark.parametrize(("seconds", "text"), [(None, "examples/s"), (4.0, "0:04 left"), (3725.0, "1:02:05 left")])
def test_the_time_left_is_told_once_it_is_known(seconds: float | None, text: str) -> None:
    stream = io.StringIO()
    LineReporter(stream).advanced(update(remaining_seconds=seconds))
    assert stream.getvalue().rstrip().endswith(text)


def test_people_are_not_flooded() -> None:
    stream, clock = io.StringIO(), Clock()
    reporter = LineReporter(stream, every_seconds=2.0, clock=clock)
    for step, now in [(1, 100.0), (2, 101.9), (3, 102.0)]:
        clock.now = now
        reporter.advanced(update(step))
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/100", "3/100"]


def test_programs_get_json_lines() -> None:
    stream = io.StringIO()
    tell_everything(JsonLinesReporter(stream))
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["started", "advanced", "published", "finished"]
    assert events[0]["replicas"] == 2
    assert events[0]["devices"] == ["device=GPU:1 kind=GPU memory_mib=81559"]
    assert events[1]["metrics"] == {"loss": 0.5}


def test_json_lines_hold_no_nan() -> None:
    stream = io.StringIO()
    JsonLinesReporter(stream).advanced(update(loss=math.nan))
    assert json.loads(stream.getvalue())["metrics"] == {"loss": None}


def test_the_rate_leaves_out_the_first_call() -> None:
    clock = Clock()
    plan = DataPlan(examples=100, global_batch_size=10, seed=0, shuffle_buffer=100, cache=True, keep_remainder=False)
    meter = ProgressMeter(100, plan, clock=clock)
    first = meter.measure(event(20, seconds=5.0))
    clock.now += 2.0
    second = meter.measure(event(40, seconds=2.0))
    assert (first.examples_per_second, first.remaining_seconds) == (0.0, None)
    assert (second.examples_per_second, second.remaining_seconds) == (100.0, 6.0)
    assert second.epoch == 4.0
    assert (second.input_wait_seconds, second.input_wait_share) == (1.0, 0.5)
