"""The envoy front end as an ASGI application, where grpc's own client would not do what a test wants."""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import pytest

from testkit.server_harness import MAX_MESSAGE_BYTES, ScriptedHandlers
from understudy.evaluator.evaluator_errors import OverloadedError
from understudy.service.calls.call_limits import DisconnectMonitor
from understudy.service.calls.metrics import new_registry
from understudy.service.calls.served_call import served_methods
from understudy.service.envoy.asgi_app import GrpcAsgiApp
from understudy.service.readiness import Readiness
from understudy.v1 import prediction_pb2

PREDICT = "/understudy.v1.PredictionService/Predict"
STREAM = "/understudy.v1.PredictionService/PredictStream"
SECONDS = 20.0
MAX_BODY_BYTES = 3 << 19
GRPC = {b"content-type": b"application/grpc"}


class Knocking:
    """An application, its handlers, and what it sends."""

    def __init__(self) -> None:
        self.handlers = ScriptedHandlers()
        methods = served_methods(self.handlers.services(Readiness()), new_registry())
        self.monitor = DisconnectMonitor()
        self.methods = methods
        self.app = GrpcAsgiApp(methods, self.monitor, MAX_MESSAGE_BYTES, max_body_bytes=MAX_BODY_BYTES)
        self.gone = False
        self.takes = asyncio.Event()
        self.takes.set()

    async def knock(
        self,
        path: str,
        *body: bytes,
        method: str = "POST",
        headers: Mapping[bytes, bytes] | None = None,
        chunks: list[bytes] | None = None,
    ) -> list[Any]:
        """Call with a body, or with chunks of one, which are taken away as they are read; return what is sent."""
        sent: list[Any] = []
        chunks = (list(body) or [b""]) if chunks is None else chunks

        async def receive() -> dict[str, Any]:
            if self.gone:
                return {"type": "http.disconnect"}
            chunk = chunks.pop(0) if chunks else b""
            return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

        async def send(event: Any) -> None:
            if self.gone:
                raise OSError
            try:
                await self.takes.wait()
            except asyncio.CancelledError:
                self.takes.set()
                raise
            sent.append(event)

        fields = list((GRPC | dict(headers or {})).items())
        await self.app({"type": "http", "method": method, "path": path, "headers": fields}, receive, send)
        return sent


@pytest.fixture
async def knocking() -> Knocking:
    return Knocking()


def framed(message: Any, *, compress: bool = False) -> bytes:
    data = message.SerializeToString()
    data = gzip.compress(data) if compress else data
    return struct.pack(">BI", compress, len(data)) + data


def asking_for(step: int) -> prediction_pb2.PredictRequest:
    request = prediction_pb2.PredictRequest()
    request.version.step = step
    return request


def status_of(events: list[Any]) -> tuple[str, str]:
    """Return the status from the trailers, or from the headers of a response that has nothing else."""
    trailers = dict(next(event for event in reversed(events) if "headers" in event)["headers"])
    return trailers[b"grpc-status"].decode(), trailers.get(b"grpc-message", b"").decode()


def answer_in(events: list[Any]) -> prediction_pb2.PredictResponse:
    body = b"".join(event["body"] for event in events if event["type"] == "http.response.body")
    return prediction_pb2.PredictResponse.FromString(body[5:])


@pytest.mark.parametrize("cut", [1, 4, 5, 7])
async def test_a_request_may_come_in_pieces(knocking: Knocking, cut: int) -> None:
    body = framed(asking_for(7))
    events = await knocking.knock(PREDICT, body[:cut], body[cut:], b"")
    assert status_of(events) == ("0", "")
    assert answer_in(events).step == 7


async def test_a_failure_without_a_message_is_headers_alone_so_that_clients_may_try_again(knocking: Knocking) -> None:
    knocking.handlers.refusal = OverloadedError("full")
    start, end = await knocking.knock(PREDICT, framed(asking_for(7)))
    assert (dict(start["headers"])[b"grpc-status"], start["trailers"]) == (b"8", False)
    assert (end["body"], end["more_body"]) == (b"", False)


async def test_a_request_that_is_too_large_is_refused_though_it_comes_in_one_piece(knocking: Knocking) -> None:
    request = asking_for(7)
    request.inputs["x"].content = bytes(MAX_MESSAGE_BYTES)
    code, message = status_of(await knocking.knock(PREDICT, framed(request)))
    assert code == "8"
    assert "Received message larger than max" in message


async def test_unfinished_bodies_hold_bounded_memory_and_a_small_request_is_answered(
    knocking: Knocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.service.calls.body_budget.ROOM_SECONDS", 0.05)
    begun, may_go_on = asyncio.Semaphore(0), asyncio.Event()

    async def unfinished(path: str) -> list[Any]:
        """Send most of a message, and no more until the end of the test."""
        sent: list[Any] = []
        chunks = [struct.pack(">BI", 0, MAX_MESSAGE_BYTES), bytes(MAX_MESSAGE_BYTES - 100)]

        async def receive() -> dict[str, Any]:
            if chunks:
                return {"type": "http.request", "body": chunks.pop(0), "more_body": True}
            begun.release()
            await may_go_on.wait()
            return {"type": "http.disconnect"}

        async def send(event: Any) -> None:
            sent.append(event)

        scope = {"type": "http", "method": "POST", "path": path, "headers": list(GRPC.items())}
        await knocking.app(scope, receive, send)
        return sent

    for held, refused in ((PREDICT, STREAM), (STREAM, PREDICT)):
        holding = asyncio.create_task(unfinished(held))
        await asyncio.wait_for(begun.acquire(), SECONDS)
        code, message = status_of(await asyncio.wait_for(unfinished(refused), SECONDS))
        assert code == "8"
        assert "--max-body-mib" in message
        body = framed(asking_for(7))
        assert answer_in(await knocking.knock(PREDICT, body[:7], body[7:], b"")).step == 7
        may_go_on.set()
        await asyncio.wait_for(holding, SECONDS)
        may_go_on.clear()


async def test_an_unfinished_request_without_a_next_piece_fails(
    knocking: Knocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.service.envoy.asgi_app.BODY_IDLE_SECONDS", 0.05)
    sent: list[Any] = []
    chunks = [framed(asking_for(7))[:6]]

    async def receive() -> dict[str, Any]:
        if chunks:
            return {"type": "http.request", "body": chunks.pop(0), "more_body": True}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {"type": "http", "method": "POST", "path": PREDICT, "headers": list(GRPC.items())}
    await asyncio.wait_for(knocking.app(scope, receive, send), SECONDS)
    code, message = status_of(sent)
    assert code == "4"
    assert "unfinished after 6 bytes" in message


async def test_what_is_refused_anyway_is_not_read(knocking: Knocking) -> None:
    knocking.handlers.refusal = OverloadedError("4096 examples are waiting")
    body = framed(asking_for(7))
    left = [body[:4], body[4:], b""]
    events = await knocking.knock(PREDICT, chunks=left)
    assert status_of(events) == ("8", "4096 examples are waiting")
    assert left == [body[:4], body[4:], b""]


async def test_a_compressed_request_is_answered(knocking: Knocking) -> None:
    events = await knocking.knock(PREDICT, framed(asking_for(7), compress=True), headers={b"grpc-encoding": b"gzip"})
    assert answer_in(events).step == 7


async def test_an_unknown_compression_is_refused_with_those_that_are_known(knocking: Knocking) -> None:
    body = b"\x01" + framed(asking_for(7))[1:]
    events = await knocking.knock(PREDICT, body, headers={b"grpc-encoding": b"br"})
    code, message = status_of(events)
    assert code == "12"
    assert "gzip" in message
    assert dict(events[0]["headers"])[b"grpc-accept-encoding"] == b"identity, deflate, gzip"


@pytest.mark.parametrize("bodies", [[], [asking_for(1), asking_for(2)]])
async def test_a_call_that_takes_one_message_refuses_none_and_several(knocking: Knocking, bodies: list[Any]) -> None:
    events = await knocking.knock(PREDICT, b"".join(framed(body) for body in bodies))
    came = "more than one message" if bodies else "no message"
    assert status_of(events) == ("3", f"got {came}; {PREDICT} takes one")


async def test_a_large_answer_comes_whole_or_not_at_all(knocking: Knocking) -> None:
    async def behave(request: Any) -> Any:
        response = prediction_pb2.PredictResponse(step=1)
        response.outputs["y"].content = bytes(request.version.step)
        return response

    knocking.handlers.behave = behave
    events = await knocking.knock(PREDICT, framed(asking_for(MAX_MESSAGE_BYTES - 100)))
    assert len(answer_in(events).outputs["y"].content) == MAX_MESSAGE_BYTES - 100
    code, message = status_of(await knocking.knock(PREDICT, framed(asking_for(MAX_MESSAGE_BYTES))))
    assert code == "8"
    assert "Sent message larger than max" in message


async def test_a_method_with_a_long_name_is_unimplemented_in_few_words(knocking: Knocking) -> None:
    """A client of gRPC takes metadata of 8 KiB at most, and would report that instead."""
    code, message = status_of(await knocking.knock("/" + "a" * 30_000, framed(asking_for(7))))
    assert code == "12"
    assert message.startswith("there is no method /aaaa")
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("method", "headers"), [("GET", {}), ("POST", {b"content-type": b"text/html"}), ("POST", {b"content-type": b""})]
)
async def test_what_is_not_grpc_is_sent_to_the_other_port(
    knocking: Knocking, method: str, headers: dict[bytes, bytes]
) -> None:
    events = await knocking.knock("/metrics", method=method, headers=headers)
    assert events[0]["status"] == 415
    assert b"HTTP port" in events[1]["body"]


async def test_a_draining_door_refuses_calls(knocking: Knocking) -> None:
    knocking.app.start_draining()
    assert status_of(await knocking.knock(PREDICT, framed(asking_for(1))))[0] == "14"


async def test_calls_that_outlast_the_drain_are_cut_off(knocking: Knocking) -> None:
    entered = asyncio.Event()

    async def behave(_request: object) -> None:
        entered.set()
        await asyncio.Event().wait()

    knocking.handlers.behave = behave
    calls = [asyncio.create_task(knocking.knock(path, framed(asking_for(1)))) for path in (PREDICT, STREAM)]
    await entered.wait()
    await knocking.monitor.until_alone(0.01)
    assert [status_of(await call)[0] for call in calls] == ["14", "14"]


@pytest.mark.timeout(SECONDS)
async def test_a_caller_that_takes_nothing_for_too_long_is_let_go(knocking: Knocking) -> None:
    served = knocking.methods[STREAM]
    served.method = replace(served.method, patience_seconds=0.05)
    knocking.takes.clear()
    sent = await knocking.knock(STREAM, framed(prediction_pb2.PredictStreamRequest()))
    assert status_of(sent) == ("10", "the caller took nothing of the answer for 0.05 s; call again")


@pytest.mark.parametrize("path", [PREDICT, STREAM])
async def test_a_caller_that_goes_while_the_body_comes_leaves_nothing_behind(knocking: Knocking, path: str) -> None:
    knocking.gone = True
    assert await knocking.knock(path) == []
    await knocking.monitor.until_alone(0)


@pytest.mark.parametrize("path", [PREDICT, STREAM])
async def test_a_computation_that_is_cancelled_from_within_ends_the_call(knocking: Knocking, path: str) -> None:
    async def behave(_request: object) -> None:
        raise asyncio.CancelledError

    knocking.handlers.behave = behave
    message = prediction_pb2.PredictStreamRequest() if path == STREAM else asking_for(1)
    assert status_of(await knocking.knock(path, framed(message)))[0] == "1"


async def test_a_unary_call_fails_at_its_second_message_without_reading_on(knocking: Knocking) -> None:
    chunks = [framed(asking_for(1)) + framed(asking_for(2))[:3], *[framed(asking_for(3))] * 1000]

    events = await knocking.knock(PREDICT, chunks=chunks)

    assert status_of(events)[0] == "3"
    assert "more than one message" in unquote(status_of(events)[1])
    assert len(chunks) > 990
