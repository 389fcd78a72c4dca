"""Scores and entries of the ledger, read by the synchronous client."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

from testkit.peer_server import STEP, Failure, Script
from understudy import clients
from understudy.clients import (
    Client,
    InvalidArgumentError,
    Metric,
    Progress,
)
from understudy.v1.evaluation_pb2 import EvaluateRequest

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def batches(count: int) -> Iterator[tuple[Any, ...]]:
    for index in range(count):
        x = np.full((2, 4), index, np.float32)
        yield (x, 2 * x + 1) if index % 2 else (x, 2 * x + 1, np.ones(2, np.float32))


def test_batches_are_scored_whatever_form_they_have(client: Client, script: Script) -> None:
    by_name = ({"image": ROWS}, {"targets": 2 * ROWS}, None)

    result = client.evaluate([*batches(3), by_name], version=STEP, metrics=["accuracy", Metric(name="AUC")])

    assert (result.examples, result.batches, result.step) == (9, 4, STEP)
    assert result.metrics == {"loss": pytest.approx(6 / 9)}
    assert result.notes == ("by NumPy",)
    options = next(request.options for request in script.requests if isinstance(request, EvaluateRequest))
    assert [metric.name for metric in options.metrics] == ["accuracy", "AUC"]
    assert options.version.step == STEP


def test_the_configuration_of_a_metric_travels_as_json(client: Client, script: Script) -> None:
    client.evaluate([({"image": ROWS}, ROWS)], metrics=[Metric(name="AUC", config={"curve": "PR"})])

    assert script.requests[0].options.metrics[0].config_json == '{"curve": "PR"}'


def test_what_the_batches_raise_reaches_the_caller(client: Client) -> None:
    def damaged() -> Iterator[tuple[Any, ...]]:
        yield from batches(2)
        raise LookupError("the file ends here")

    with pytest.raises(LookupError, match="the file ends here"):
        client.evaluate(damaged())


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        (ROWS, "a batch is (x, y) or (x, y, sample_weight), or (x,) without targets, but got an ndarray"),
        ((), "a batch is (x, y) or (x, y, sample_weight), or (x,) without targets, but got a tuple of 0"),
        ((ROWS, ROWS.astype(complex)), "targets: dtype complex128 cannot be sent"),
    ],
)
def test_what_is_no_batch_is_refused(client: Client, batch: Any, complaint: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        client.evaluate([batch])

    assert str(refusal.value).startswith(complaint)


def test_a_refused_stream_says_why(client: Client, script: Script) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.NOT_FOUND, message="no such step"))
    with pytest.raises(clients.NotFoundError, match="no such step"):
        client.evaluate(({"image": ROWS}, ROWS) for _ in iter(int, 1))
    with pytest.raises(InvalidArgumentError, match="a stream without a batch"):
        client.evaluate([])


def test_a_slow_server_slows_the_drawing_of_batches(client: Client, script: Script) -> None:
    script.gate.clear()
    drawn = 0
    moved = threading.Event()

    def large() -> Iterator[tuple[Any, ...]]:
        nonlocal drawn
        for _ in range(200):
            drawn += 1
            moved.set()
            yield {"image": np.ones((64, 1024), np.float32)}, np.full((64, 1024), 2, np.float32)

    def open_when_nothing_moves() -> None:
        while moved.wait(0.5):
            moved.clear()
        before_opening.append(drawn)
        script.gate.set()

    before_opening: list[int] = []
    opener = threading.Thread(target=open_when_nothing_moves)
    opener.start()
    result = client.evaluate(large())
    opener.join(20)

    assert result.metrics == {"loss": 0.0}
    assert result.batches == 200
    assert before_opening[0] < 100  # of half a mebibyte each


def test_a_dataset_of_the_server_is_scored_with_progress(client: Client) -> None:
    seen: list[Progress] = []

    evaluation = client.evaluate_dataset("test", version=40, on_progress=seen.append)

    assert [progress.examples for progress in seen] == [10, 20]
    assert (evaluation.step, evaluation.dataset, evaluation.outcome) == (40, "test", "scored")


def test_the_ledger_is_listed_page_by_page(client: Client, script: Script) -> None:
    for step in range(1, 6):
        script.record(step)

    listed = list(client.list_evaluations(dataset="test", min_step=1, outcome="scored"))

    assert [evaluation.step for evaluation in listed] == [1, 2, 3, 4, 5]
    assert script.calls["ListEvaluations"] == 3
    assert script.requests[0].min_step == 1
    assert not script.requests[0].HasField("max_step")


def test_the_hardest_examples_of_a_step_are_read(client: Client, script: Script) -> None:
    found = client.examples("hardest", "test", version=STEP, max_examples=5)

    assert (found.evaluation.step, found.indices, found.described) == (STEP, (7,), ({"loss": 0.5},))
    assert (found.baseline, found.flips, found.inputs) == (None, None, {})
    assert (script.requests[0].dataset, script.requests[0].max_examples) == ("test", 5)
    assert client.evaluation_tables("test", version=STEP).content == {"examples": 20}


def test_an_unknown_kind_of_examples_is_refused(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="kind is 'easy'; expected one of hardest, newly_wrong, newly_right"):
        client.examples("easy")  # type: ignore[arg-type]


def test_an_unknown_outcome_is_refused(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="outcome is 'lost'; expected one of scored, skipped, failed"):
        list(client.list_evaluations(outcome="lost"))  # type: ignore[arg-type]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, whatever ran before in this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("call", [Client.evaluate, partial(Client.compare, versions=[STEP, STEP])])
@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_stream_ends_on_the_server_too_and_draws_no_more_batches(
    client: Client, script: Script, call: Callable[[Client, Iterator[Any]], object]
) -> None:
    script.gate.clear()
    drawn = 0

    def endless() -> Iterator[tuple[Any, ...]]:
        nonlocal drawn
        while True:
            drawn += 1
            yield {"image": ROWS}, ROWS

    def interrupt() -> None:
        script.at_gate.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        call(client, endless())
    interrupting.join()
    assert script.gate.wait(20)  # the peer saw the end of the call
    before = drawn
    assert client.predict({"image": ROWS}).step == STEP
    assert drawn - before <= 1
