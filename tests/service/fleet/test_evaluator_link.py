"""The connection of a server that follows, to evaluators that answer as told."""

# ruff: noqa: N802 - the protocol names its methods

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from testkit.in_process import until
from understudy.evaluator.serving.decision_file import ServingDecision
from understudy.service.fleet.evaluator_link import GrpcEvaluatorLink, LinkSettings
from understudy.v1 import fleet_pb2, fleet_pb2_grpc

SECONDS = 20.0


class Evaluator(fleet_pb2_grpc.FleetServiceServicer):
    """Decides for one checkpoint, whose files all have the same content."""

    def __init__(self, decision: ServingDecision) -> None:
        self._response = fleet_pb2.FollowResponse(
            decision=fleet_pb2.ServingDecision(
                step=decision.step, digest=decision.digest, sequence=decision.sequence, evaluator_id="one"
            )
        )

    def Follow(self, request_iterator: Any, context: Any) -> Iterator[fleet_pb2.FollowResponse]:
        del context
        yield self._response
        yield from (fleet_pb2.FollowResponse() for _ in request_iterator)

    def ReadCheckpoint(self, request: Any, context: Any) -> Iterator[fleet_pb2.ReadCheckpointResponse]:
        del context
        yield fleet_pb2.ReadCheckpointResponse(content=request.path.encode())

    def GetFleet(self, request: Any, context: Any) -> fleet_pb2.GetFleetResponse:
        del request, context
        return fleet_pb2.GetFleetResponse()


@contextmanager
def evaluator(decision: ServingDecision) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(Evaluator(decision), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=0).wait(SECONDS)


@contextmanager
def linked(*addresses: str) -> Iterator[GrpcEvaluatorLink]:
    settings = LinkSettings(
        addresses=addresses,
        name="one",
        model_name="",
        tls_ca=None,
        tls_cert=None,
        tls_key=None,
        tls_server_name=None,
        token_file=None,
        token_without_tls=False,
    )
    link = GrpcEvaluatorLink(settings, software_version="0")
    try:
        yield link
    finally:
        link.close()


@pytest.fixture
def decision() -> ServingDecision:
    return ServingDecision(step=10, digest="ab" * 32, sequence=1)


def test_the_checkpoint_of_a_decision_can_be_read_as_soon_as_it_is_told(decision: ServingDecision) -> None:
    found: list[bytes | Exception] = []
    told = threading.Event()

    def read(decided: ServingDecision) -> None:
        try:
            found.append(b"".join(link.read(decided, "manifest.json")))
        except ConnectionError as error:
            found.append(error)
        told.set()

    with evaluator(decision) as address, linked(address) as link:
        link.start(read)
        assert told.wait(SECONDS)
    assert found == [b"manifest.json"]


def test_the_next_address_is_tried_if_the_decision_at_one_cannot_be_accepted(decision: ServingDecision) -> None:
    refused = ServingDecision(step=10, digest="../../..", sequence=1)
    followed = threading.Event()

    def accept(decided: ServingDecision) -> None:
        if decided.digest == refused.digest:
            raise ValueError("it decided for no checkpoint")
        followed.set()

    with evaluator(refused) as wrong, evaluator(decision) as right:
        with linked(wrong) as link:
            link.start(accept)
            until(lambda: "it decided for no checkpoint" in link.problem)
            assert not link.is_connected
            assert not followed.is_set()
        with linked(wrong, right) as link:
            link.start(accept)
            assert followed.wait(SECONDS)


def test_another_address_that_is_behind_is_not_followed_until_it_has_caught_up(decision: ServingDecision) -> None:
    told: list[int] = []
    with ExitStack() as stack, evaluator(decision) as behind:
        first = stack.enter_context(evaluator(replace(decision, sequence=2)))
        with linked(first, behind) as link:
            link.start(lambda decided: told.append(decided.sequence))
            until(lambda: told == [2])
            stack.close()
            until(lambda: "it is at decision 1, and" in link.problem)
            assert not link.is_connected
            assert told == [2]
