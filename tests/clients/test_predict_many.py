"""Many predictions of the synchronous client through one stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from testkit.peer_server import STEP, Failure, Script
from understudy import clients
from understudy.clients import (
    Client,
    InvalidArgumentError,
    PredictResult,
    UnderstudyError,
)

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_many_predictions_keep_their_order(client: Client) -> None:
    batches = [np.full((2, 4), value, np.float32) for value in range(200)]

    results = list(client.predict_many(batches))

    assert [prediction(result).output[0, 0] for result in results] == [2 * value for value in range(200)]


def test_one_bad_item_fails_alone(client: Client) -> None:
    items: list[Any] = [{"image": ROWS}, {"picture": ROWS}, {"image": ROWS.astype(complex)}, {"image": ROWS}]

    first, refused, unsent, last = client.predict_many(items)

    assert prediction(first).step == prediction(last).step == STEP
    assert isinstance(refused, InvalidArgumentError)
    assert str(refused) == "got picture; expected image"
    assert isinstance(unsent, InvalidArgumentError)
    assert "complex128 cannot be sent" in str(unsent)


def test_an_item_that_is_refused_for_now_says_when_to_send_it_again(client: Client) -> None:
    (refused,) = client.predict_many([ROWS], version=429)

    assert isinstance(refused, clients.OverloadedError)
    assert (str(refused), refused.retry_after_seconds) == ("the queue is full", 0.25)


def test_items_are_drawn_no_further_ahead_than_allowed(client: Client, script: Script) -> None:
    drawn: list[int] = []

    def items() -> Iterator[dict[str, npt.NDArray[np.float32]]]:
        for index in range(50):
            drawn.append(index)
            yield {"image": ROWS}

    for taken, _ in enumerate(client.predict_many(items(), in_flight=4), start=1):
        assert len(drawn) <= taken + 4 + 1  # those unanswered, and one ready to go

    assert len(drawn) == script.calls["PredictStream"] * 50


def test_a_stream_left_early_ends_the_call(client: Client) -> None:
    results = client.predict_many(({"image": ROWS} for _ in iter(int, 1)), in_flight=2)
    next(results)

    results.close()

    assert client.predict({"image": ROWS}).step == STEP


def test_what_the_items_raise_is_raised_after_the_results_before_it(client: Client) -> None:
    def items() -> Iterator[dict[str, npt.NDArray[np.float32]]]:
        yield {"image": ROWS}
        raise LookupError("no more examples")

    results = client.predict_many(items())

    assert prediction(next(results)).step == STEP
    with pytest.raises(LookupError, match="no more examples"):
        next(results)


def test_a_stream_whose_call_fails_does_not_wait_for_its_items(client: Client, script: Script) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.FAILED_PRECONDITION, message="not now"))
    released = threading.Event()

    def items() -> Iterator[dict[str, npt.NDArray[np.float32]]]:
        released.wait(20)
        yield {"image": ROWS}

    with pytest.raises(clients.FailedPreconditionError, match="not now"):
        list(client.predict_many(items()))
    released.set()


def prediction(outcome: PredictResult | UnderstudyError) -> PredictResult:
    assert isinstance(outcome, PredictResult)
    return outcome
