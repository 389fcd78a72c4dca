"""When the synchronous client gives up, tries a call again, and asks another server."""

from __future__ import annotations

import json

import grpc
import numpy as np
import pytest

from testkit.peer_server import STEP, Failure, Peer, Script
from understudy import clients
from understudy.clients import (
    Client,
)
from understudy.clients.channel import service_config
from understudy.v1 import evaluation_pb2, fleet_pb2, metrics_pb2, model_pb2, prediction_pb2

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)

ATTEMPTS = 5
"""How often the clients try a call that is safe to repeat."""


def unavailable() -> Failure:
    return Failure(code=grpc.StatusCode.UNAVAILABLE)


def test_a_call_ends_at_its_deadline(client: Client, script: Script) -> None:
    script.gate.clear()

    with pytest.raises(clients.DeadlineExceededError):
        client.predict({"image": ROWS}, timeout_seconds=0.1)


def test_what_may_be_repeated_is_tried_again_while_the_server_is_unavailable(client: Client, script: Script) -> None:
    cancelled = Failure(code=grpc.StatusCode.CANCELLED)  # by a server that shuts down
    script.failures.extend([unavailable(), cancelled])

    assert client.predict({"image": ROWS}).step == STEP
    assert script.calls["Predict"] == 3


def test_every_method_is_tried_again_but_those_that_must_not() -> None:
    """Promote might roll back twice, and the clients resume watches and downloads themselves."""
    services = (prediction_pb2, evaluation_pb2, model_pb2, fleet_pb2, metrics_pb2)
    methods = {
        (service.full_name, method.name)
        for module in services
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    (retried,) = json.loads(service_config())["methodConfig"]
    repeated = {(each["service"], each["method"]) for each in retried["name"]}
    assert {name for _, name in methods - repeated} == {"Promote", "WatchEvaluations", "Follow", "ReadCheckpoint"}
    assert repeated <= methods


def test_trying_again_ends_after_five_attempts(client: Client, script: Script) -> None:
    script.failures.extend(unavailable() for _ in range(10))

    with pytest.raises(clients.UnavailableError, match="told to fail"):
        client.status()

    assert script.calls["GetModelStatus"] == ATTEMPTS


def test_a_promotion_is_never_repeated(client: Client, script: Script) -> None:
    script.failures.append(unavailable())

    with pytest.raises(clients.UnavailableError):
        client.roll_back()

    assert script.calls["Promote"] == 1


def test_several_servers_take_turns_and_stand_in_for_each_other() -> None:
    with Peer() as one, Peer() as other, Client([one.target, f"localhost:{other.port}"], timeout_seconds=20) as client:
        while not (one.script.calls["Predict"] and other.script.calls["Predict"]):  # until both are connected
            client.predict({"image": ROWS})
        before = one.script.calls["Predict"], other.script.calls["Predict"]
        for _ in range(10):
            client.predict({"image": ROWS})
        gained = one.script.calls["Predict"] - before[0], other.script.calls["Predict"] - before[1]
        assert min(gained) >= 4

        other.__exit__(None, None, None)

        for _ in range(10):
            assert client.predict({"image": ROWS}).step == STEP


@pytest.mark.parametrize(
    ("targets", "complaint"),
    [
        ("", "expected at least one target"),
        ([], "expected at least one target"),
        (["127.0.0.1:1", "127.0.0.1"], "expected HOST:PORT, got '127.0.0.1'"),
        ("http://127.0.0.1:1/", "expected HOST:PORT, got the URL 'http://127.0.0.1:1/'; give '127.0.0.1:1'"),
    ],
)
def test_bad_targets_are_refused(targets: str | list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Client(targets)
