"""The synchronous client watches the evaluations."""

from __future__ import annotations

import threading
from contextlib import aclosing

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from testkit.peer_server import PATIENCE_SECONDS, Failure, Peer, Script
from understudy import clients
from understudy.clients import (
    AsyncClient,
    Client,
    Evaluation,
)


def unavailable() -> Failure:
    return Failure(code=grpc.StatusCode.UNAVAILABLE)


def test_watching_misses_and_repeats_nothing_over_breaks(client: Client, script: Script) -> None:
    script.watch_breaks_after.extend([2, 0, 1])
    for step in range(1, 5):
        script.record(step)
    watch = client.watch_evaluations(after=1)

    seen = [next(watch) for _ in range(3)]
    script.record(5)
    seen.append(next(watch))

    assert [evaluation.sequence for evaluation in seen] == [2, 3, 4, 5]
    assert script.calls["WatchEvaluations"] == 4


async def test_a_resumed_watch_says_which_entry_it_saw_last(
    client: Client, async_client: AsyncClient, script: Script
) -> None:
    written = Timestamp(seconds=5, nanos=123456789)
    for step in (1, 2):
        script.record(step, recorded_at=written)
    script.watch_breaks_after.extend([1, 1])

    watch = client.watch_evaluations()
    assert [next(watch).step, next(watch).step] == [1, 2]
    script.watch_breaks_after.append(1)
    async with aclosing(async_client.watch_evaluations()) as async_watch:
        assert [(await anext(async_watch)).step, (await anext(async_watch)).step] == [1, 2]

    resumed = [request for request in script.requests if request.after_sequence]
    assert [(request.after_sequence, request.after_recorded_at) for request in resumed] == [(1, written)] * 2


def test_watching_survives_a_restart_of_the_server() -> None:
    script = Script()
    script.record(1)
    with Peer(script) as first:
        client = Client(first.target)
        watch = client.watch_evaluations()
        seen: list[Evaluation] = [next(watch)]
    script.record(2)
    with Peer(script, port=first.port), client:
        seen.append(next(watch))

    assert [evaluation.step for evaluation in seen] == [1, 2]


def test_watching_resumes_after_a_server_cancelled_it(client: Client, script: Script) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.CANCELLED))
    script.record(1)

    assert next(client.watch_evaluations()).step == 1


def test_watching_ends_when_the_client_is_closed(client: Client, script: Script) -> None:
    script.record(1)
    watch = client.watch_evaluations()
    next(watch)
    client.close()

    with pytest.raises(clients.CancelledError):
        next(watch)


def test_watching_ends_when_the_client_is_closed_before_it_resumes(peer: Peer, script: Script) -> None:
    script.failures.append(unavailable())
    client = Client(peer.target)
    watch = client.watch_evaluations()

    def close() -> None:
        script.entered.wait(PATIENCE_SECONDS)
        client.close()

    closing = threading.Thread(target=close)
    closing.start()

    with pytest.raises(clients.CancelledError):
        next(watch)
    closing.join()


def test_watching_ends_on_an_error_that_time_does_not_mend(client: Client, script: Script) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.UNIMPLEMENTED))

    with pytest.raises(clients.UnimplementedError):
        next(client.watch_evaluations())
