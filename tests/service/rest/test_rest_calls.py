"""What is around a call of the REST form, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import structlog
from prometheus_client import CollectorRegistry

from testkit.hostile_connections import FORGED_ADDRESS
from testkit.scripted_evaluator import ScriptedEvaluator, inference_handler, prediction
from understudy.evaluator.evaluator_errors import OverloadedError
from understudy.service.calls.body_budget import BodyBudget
from understudy.service.calls.metrics import new_registry
from understudy.service.calls.served_call import served_methods
from understudy.service.calls.status import CALLER_GONE, DEADLINE_PASSED
from understudy.service.handlers.status_handlers import MetricsHandler
from understudy.service.http_app import build_app
from understudy.service.http_server import HttpServer, bind
from understudy.service.readiness import Readiness
from understudy.service.rest.rest_app import RestApp
from understudy.service.rest.rest_call import DEFAULT_TIMEOUT_SECONDS
from understudy.service.rest.rest_routes import RestRoutes
from understudy.service.services import inference_service, metrics_service, plain_codecs

SECONDS = 10
INFER = "/v2/models/model/infer"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}


@dataclass
class RestServer:
    """A running HTTP server, a client of it, and state that tests inspect."""

    address: tuple[str, int]
    client: httpx.AsyncClient
    evaluator: ScriptedEvaluator
    registry: CollectorRegistry

    def counted(self, name: str, method: str = "ModelInfer", **labels: str) -> float | None:
        service = {"grpc_type": "unary", "grpc_service": "inference.GRPCInferenceService", "grpc_method": method}
        return self.registry.get_sample_value(f"grpc_server_{name}", service | labels)

    async def unfinished(self, header: str = "") -> tuple[int, dict[str, str], str]:
        """Send a part of a body, and never the rest; return the status, the headers and the error that come back."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(f"POST {INFER} HTTP/1.1\r\nhost: server\r\ncontent-length: 9\r\n{header}\r\n{{".encode())
        async with asyncio.timeout(SECONDS):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            content = await reader.readexactly(int(headers["content-length"]))
        writer.close()
        await writer.wait_closed()
        return int(head[0].split()[1]), headers, json.loads(content)["error"]


@pytest.fixture
async def server(executor: ThreadPoolExecutor) -> AsyncIterator[RestServer]:
    evaluator, readiness, registry = ScriptedEvaluator(), Readiness(), new_registry()
    handler = inference_handler(evaluator, readiness, executor)
    metrics = MetricsHandler(registry, executor=executor)
    methods = served_methods([inference_service(handler, plain_codecs()), metrics_service(metrics)], registry)
    routes = RestRoutes(methods, max_body_bytes=1000, bodies=BodyBudget(2 * 1000), executor=executor)
    rest_app = RestApp(handler, metrics, routes, readiness=readiness)
    app = build_app(readiness=readiness, routes=rest_app.routes())
    listener = bind("127.0.0.1", 0)
    http_server = HttpServer(app, listener, max_connections=20)
    await http_server.start()
    host, port = listener.getsockname()
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=SECONDS) as client:
        yield RestServer((host, port), client, evaluator, registry)
    await http_server.stop()


async def asked(server: RestServer, headers: dict[str, str] | None = None) -> asyncio.Task[httpx.Response]:
    """Send an inference request, and return its response to be."""
    return asyncio.create_task(server.client.post(INFER, json=BODY, headers=headers))


async def test_a_call_is_counted_as_one_of_its_grpc_method(server: RestServer) -> None:
    response = await asked(server)
    (await server.evaluator.predictions.get()).set_result(prediction(1))
    assert (await response).status_code == 200

    assert server.counted("handled_total", grpc_code="OK") == 1
    names = ("started_total", "msg_received_total", "msg_sent_total", "handling_seconds_count")
    assert [server.counted(name) for name in names] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("path", "method"),
    [("/v2", "ServerMetadata"), ("/v2/health/live", "ServerLive"), ("/v2/health/ready", "ServerReady")],
)
async def test_a_call_without_a_body_is_counted_as_well(server: RestServer, path: str, method: str) -> None:
    await server.client.get(path)

    names = ("started_total", "msg_received_total", "msg_sent_total")
    assert [server.counted(name, method) for name in names] == [1, 1, 1]


async def test_metrics_come_in_prometheus_text_format(server: RestServer) -> None:
    response = await server.client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "\ngrpc_server_started_total{" in response.text
    assert "_created" not in response.text


async def test_metrics_come_in_openmetrics_for_those_who_ask(server: RestServer) -> None:
    response = await server.client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert response.text.endswith("# EOF\n")


async def test_a_failed_call_is_written_to_the_access_log_with_its_peer_and_size(server: RestServer) -> None:
    with structlog.testing.capture_logs() as lines:
        await server.client.post("/v2/models/other/infer", content=b"{}", headers=FORGED_ADDRESS)

    (line,) = [line for line in lines if line["event"] == "call ended"]
    assert line["method"] == "/inference.GRPCInferenceService/ModelInfer"
    assert (line["code"], line["received_bytes"]) == ("NOT_FOUND", 0)
    assert re.fullmatch(r"127\.0\.0\.1:\d+", line["peer"])
    assert "'other'" in line["message"]
    assert line["seconds"] > 0


@pytest.mark.parametrize("header", [{"x-request-timeout": "0.05"}, {"x-envoy-expected-rq-timeout-ms": "50"}])
async def test_a_call_whose_deadline_passes_is_cancelled_and_answered_with_504(
    server: RestServer, header: dict[str, str]
) -> None:
    response = await asked(server, header)
    computing = await server.evaluator.predictions.get()

    answer = await response

    assert (answer.status_code, answer.json()) == (504, {"error": DEADLINE_PASSED.message})
    assert computing.cancelled()
    assert server.counted("handled_total", grpc_code="DeadlineExceeded") == 1


async def test_the_deadline_holds_while_the_body_arrives(server: RestServer) -> None:
    status, _, error = await server.unfinished("x-request-timeout: 0.05\r\n")

    assert (status, error) == (504, DEADLINE_PASSED.message)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, DEFAULT_TIMEOUT_SECONDS),
        ({"x-request-timeout": "20"}, 20),
        ({"x-request-timeout": "30.5", "x-envoy-expected-rq-timeout-ms": "12000"}, 12),
        ({"x-request-timeout": "1000"}, 1000),
        ({"x-envoy-expected-rq-timeout-ms": "unset"}, DEFAULT_TIMEOUT_SECONDS),
    ],
)
async def test_the_deadline_is_the_earlier_of_the_caller_s_and_the_proxy_s(
    server: RestServer, headers: dict[str, str], seconds: float
) -> None:
    response = await asked(server, headers)
    (await server.evaluator.predictions.get()).set_result(prediction(1))
    await response

    deadline = server.evaluator.asked["deadline"]
    assert deadline == server.evaluator.admission_deadline
    assert seconds - SECONDS < deadline - time.monotonic() < seconds


@pytest.mark.parametrize("seconds", ["-1", "soon", "1e3", "", "9" * 10])
async def test_a_malformed_timeout_is_the_caller_s_error(server: RestServer, seconds: str) -> None:
    answer = await server.client.post(INFER, json=BODY, headers={"x-request-timeout": seconds})

    assert answer.status_code == 400
    assert answer.json()["error"].startswith(f"X-Request-Timeout is {seconds!r}")


async def test_a_call_that_is_not_admitted_gets_429_and_the_time_of_a_retry_before_its_body_is_read(
    server: RestServer,
) -> None:
    server.evaluator.admission_refusals = [OverloadedError("the queue is full", retry_after_seconds=1.25)]

    status, headers, error = await server.unfinished()

    assert (status, error, headers["retry-after"]) == (429, "the queue is full", "2")
    assert server.counted("msg_received_total") == 0


async def test_unfinished_bodies_hold_bounded_memory_and_a_small_request_is_answered(server: RestServer) -> None:
    part = f"POST {INFER} HTTP/1.1\r\nhost: server\r\ncontent-length: 1000\r\n\r\n".encode() + b" " * 900
    for round_number in range(2):  # the second time shows that what was held is given back
        connections = [await asyncio.open_connection(*server.address) for _ in range(3)]
        for _, writer in connections:
            writer.write(part)
        heads = [asyncio.create_task(reader.readuntil(b"\r\n\r\n")) for reader, _ in connections]
        done, waiting = await asyncio.wait(heads, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
        assert [head.result().split()[1] for head in done] == [b"429"]
        assert len(waiting) == 2

        response = await asked(server)
        (await server.evaluator.predictions.get()).set_result(prediction(1))
        assert (await response).status_code == 200
        for _, writer in connections:
            writer.close()
        await asyncio.gather(*heads, return_exceptions=True)
        async with asyncio.timeout(SECONDS):
            while server.counted("handled_total", grpc_code="Canceled") != 2 * (round_number + 1):  # noqa: ASYNC110 - the count says nothing by itself
                await asyncio.sleep(0.01)


async def test_a_call_whose_caller_disconnects_is_cancelled_and_counted(server: RestServer) -> None:
    with structlog.testing.capture_logs() as lines:
        response = await asked(server)
        computing = await server.evaluator.predictions.get()
        response.cancel()
        await cancelled(computing)
        await server.client.get("/v2")  # by now the other call's task has run

    assert server.counted("handled_total", grpc_code="Canceled") == 1
    (line,) = [line for line in lines if line["event"] == "call ended"]
    assert line["message"] == CALLER_GONE.message


async def test_one_disconnect_cancels_no_other_call(server: RestServer) -> None:
    going = await asked(server)
    abandoned = await server.evaluator.predictions.get()
    staying = await asked(server)
    computing = await server.evaluator.predictions.get()
    going.cancel()
    await cancelled(abandoned)

    computing.set_result(prediction(1))

    assert (await staying).status_code == 200


async def cancelled(future: asyncio.Future[Any]) -> None:
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(future), SECONDS)
