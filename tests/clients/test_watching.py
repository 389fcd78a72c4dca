"""The synchronous client watches the evaluations."""

from __future__ import annotations

import threading

import grpc
import pytest

from testkit.peer_server import PATIENCE_SECONDS, Failure, Peer, Script
from understudy import clients
from understudy.clients import (
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
