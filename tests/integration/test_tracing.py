"""Traces of a whole server arrive at a receiver of OpenTelemetry, over its protocol."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from integration.conftest import Run
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, StatusCode
from tensorflow_serving.apis import prediction_service_pb2_grpc, regression_pb2

from testkit.checkpoints import WIDTH, Chief, ones
from testkit.front_ends import FRONT_ENDS
from testkit.in_process import RunningService, running_service, until
from testkit.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from understudy.clients import InvalidArgumentError
from understudy.service.tracing.tracing import trace_id_of

pytestmark = pytest.mark.long

PREDICT = "understudy.v1.PredictionService/Predict"
INFER = "POST /v2/models/{model}/infer"
STEP = 10
BETTER = 30
LIFE = ["checkpoint", "verified", "loaded", "warmed up", "scored", "accepted", "served", "replaced"]
MARK = 1 << 64
"""The trace ids from here on are of calls that a test waits for because they are the last."""
SERVER = int(SpanKind.SERVER.value) + 1  # the protocol counts from 1
ERROR = StatusCode.ERROR.value
SAMPLED = "00-{:032x}-00f067aa0ba902b7-01"
NOT_SAMPLED = "00-{:032x}-00f067aa0ba902b7-00"


@pytest.fixture(autouse=True, scope="module")
def quick_export() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_SERVICE_NAME", "digits")
        yield


@pytest.fixture(scope="module", params=FRONT_ENDS)
def traced(
    request: pytest.FixtureRequest, replicas: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningService, OtlpReceiver]]:
    """A service that samples no trace unless its caller does."""
    run = tmp_path_factory.mktemp("run")
    Chief(run).publish(STEP)
    with otlp_receiver() as receiver:
        settings = {"run_dir": run, "tracing": True, "tracing_endpoint": receiver.url, "tracing_sample": 0.0}
        options: dict[str, Any] = {"state_dir": run / "evaluator", "front_end": request.param}
        with running_service(settings, {}, replicas=replicas, **options) as service:
            service.wait_ready()
            yield service, receiver


def in_trace(receiver: OtlpReceiver, trace_id: int, count: int) -> dict[str, ReceivedSpan]:
    """Wait for the spans of a trace."""
    spans = receiver.wait_for(lambda received: sum(span.trace_id == f"{trace_id:032x}" for span in received) >= count)
    return {span.name: span for span in spans if span.trace_id == f"{trace_id:032x}"}


def test_a_call_has_spans_from_its_start_to_its_reply(traced: tuple[RunningService, OtlpReceiver]) -> None:
    service, receiver = traced
    service.client().predict(ones(3), metadata=[("traceparent", SAMPLED.format(1))])
    spans = in_trace(receiver, 1, 5)
    call, queue, batch, compute, reply = (spans[name] for name in (PREDICT, "queue", "batch", "compute", "reply"))

    assert call.parent_id == "00f067aa0ba902b7"
    assert call.kind == SERVER
    assert call.service == "digits"
    assert call.attributes.pop("understudy.request_id")
    assert call.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": PREDICT,
        "rpc.status_code": "OK",
        "rpc.response.status_code": "OK",
    }
    assert [span.parent_id for span in (queue, batch, reply)] == [call.span_id] * 3
    assert compute.parent_id == batch.span_id
    assert batch.attributes == {
        "understudy.step": STEP,
        "understudy.batch.examples": 3,
        "understudy.batch.requests": 1,
    }
    times = [call.began_ns, queue.began_ns, queue.ended_ns, compute.ended_ns, reply.ended_ns, call.ended_ns]
    assert times == sorted(times)
    assert abs(call.ended_ns / 1e9 - time.time()) < 30


def test_a_rest_call_has_the_same_spans_and_the_names_of_http(traced: tuple[RunningService, OtlpReceiver]) -> None:
    service, receiver = traced
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, WIDTH], "data": ones(2).tolist()}
    headers = {"traceparent": SAMPLED.format(2)}
    httpx.post(f"http://{service.http}/v2/models/model/infer", json={"inputs": [tensor]}, headers=headers)
    spans = in_trace(receiver, 2, 5)

    assert spans.keys() == {INFER, "queue", "batch", "compute", "reply"}
    assert spans[INFER].attributes["http.request.method"] == "POST"
    assert spans[INFER].attributes["http.route"] == "/v2/models/{model}/infer"
    assert spans[INFER].attributes["http.response.status_code"] == 200
    assert spans[INFER].attributes["rpc.method"] == "inference.GRPCInferenceService/ModelInfer"
    assert spans[INFER].attributes["rpc.status_code"] == "OK"


def test_a_failed_call_says_so_and_only_the_server_s_failures_are_errors(
    traced: tuple[RunningService, OtlpReceiver],
) -> None:
    service, receiver = traced
    client = service.client()
    with pytest.raises(InvalidArgumentError):
        client.predict({"y": ones(1)}, metadata=[("traceparent", SAMPLED.format(3))])
    with grpc.insecure_channel(service.grpc) as channel, pytest.raises(grpc.RpcError):
        prediction_service_pb2_grpc.PredictionServiceStub(channel).Regress(
            regression_pb2.RegressionRequest(), timeout=30, metadata=(("traceparent", SAMPLED.format(4)),)
        )

    (refused,) = in_trace(receiver, 3, 1).values()
    assert (refused.attributes["rpc.status_code"], refused.attributes["error.type"]) == ("INVALID_ARGUMENT",) * 2
    assert refused.status != ERROR
    (unknown,) = in_trace(receiver, 4, 1).values()
    assert unknown.attributes["rpc.status_code"] == "UNIMPLEMENTED"
    assert (unknown.status, bool(unknown.message)) == (ERROR, True)


def test_each_message_of_a_stream_has_its_own_time_in_the_queue_and_on_the_devices(
    traced: tuple[RunningService, OtlpReceiver],
) -> None:
    service, receiver = traced
    metadata = [("traceparent", SAMPLED.format(5))]
    assert len(list(service.client().predict_many([ones(1), ones(2)], metadata=metadata))) == 2
    in_trace(receiver, 5, 6)

    names = [span.name for span in receiver.spans if span.trace_id == f"{5:032x}"]
    assert names.count("queue") == names.count("compute") == 2
    assert "reply" not in names


def test_calls_that_share_a_batch_are_linked(traced: tuple[RunningService, OtlpReceiver]) -> None:
    service, receiver = traced
    client = service.client()
    first = 1000

    def shared() -> tuple[ReceivedSpan, list[ReceivedSpan]] | None:
        batches = [span for span in receiver.spans if span.name == "batch" and span.links]
        return next(
            ((batch, linked) for batch in batches if (linked := [s for s in receiver.spans if links_to(s, batch)])),
            None,
        )

    def links_to(span: ReceivedSpan, batch: ReceivedSpan) -> bool:
        is_of_another = span.name == "compute" and span.trace_id != batch.trace_id
        return is_of_another and (batch.trace_id, batch.span_id) in span.links

    def call(number: int) -> None:
        client.predict(ones(1), metadata=[("traceparent", SAMPLED.format(number))])

    with ThreadPoolExecutor(32) as pool:
        ends = time.monotonic() + 60
        while shared() is None:
            assert time.monotonic() < ends
            list(pool.map(call, range(first, first + 64)))
            first += 64
    found = shared()
    assert found is not None
    batch, (compute, *_) = found
    assert batch.attributes["understudy.batch.requests"] > 1
    assert (compute.trace_id, compute.parent_id) in batch.links
    assert (compute.began_ns, compute.ended_ns) == pytest.approx((batch.began_ns, batch.ended_ns), abs=50_000_000)


@pytest.mark.parametrize(
    "header",
    [
        None,
        NOT_SAMPLED.format(6),
        "",
        "nonsense",
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "ff" + SAMPLED[2:].format(6),
    ],
)
def test_nothing_is_recorded_without_a_valid_context_that_is_sampled(
    traced: tuple[RunningService, OtlpReceiver], header: str | None
) -> None:
    service, receiver = traced
    client = service.client()
    own = [("x-request-id", "untraced")]
    client.predict(ones(1), metadata=own if header is None else [*own, ("traceparent", header)])
    mark = MARK + len(receiver.spans)
    client.predict(ones(1), metadata=[("traceparent", SAMPLED.format(mark))])
    in_trace(receiver, mark, 5)

    assert "untraced" not in {span.attributes.get("understudy.request_id") for span in receiver.spans}


def test_probes_and_scrapes_are_not_traced(traced: tuple[RunningService, OtlpReceiver]) -> None:
    service, receiver = traced
    headers = {"traceparent": SAMPLED.format(7)}
    for path in ("/metrics", "/v2/health/live", "/v2/health/ready", "/v2/models/model/ready", "/healthz"):
        assert httpx.get(f"http://{service.http}{path}", headers=headers).status_code == 200
    assert service.client().is_serving()
    httpx.get(f"http://{service.http}/v2/models/model", headers=headers)

    assert in_trace(receiver, 7, 1).keys() == {"GET /v2/models/{model}"}


def test_histograms_name_traces_as_exemplars_in_openmetrics(traced: tuple[RunningService, OtlpReceiver]) -> None:
    service, _ = traced
    service.client().predict(ones(1), metadata=[("traceparent", SAMPLED.format(8))])
    url = f"http://{service.http}/metrics"
    text = httpx.get(url, headers={"accept": "application/openmetrics-text; version=1.0.0"}).text
    exemplar = rf' # {{span_id="[0-9a-f]{{16}}",trace_id="{8:032x}"}} '

    for name in ("understudy_queue_seconds", "understudy_compute_seconds", "grpc_server_handling_seconds"):
        assert re.search(rf"^{name}_bucket{{.*{exemplar}", text, re.MULTILINE), name
    assert "trace_id" not in httpx.get(url).text


def test_the_client_passes_on_the_current_span(traced: tuple[RunningService, OtlpReceiver]) -> None:
    service, receiver = traced
    client = service.client()
    with TracerProvider().get_tracer("test").start_as_current_span("a caller's") as span:
        client.predict(ones(1))
    context = span.get_span_context()

    assert in_trace(receiver, context.trace_id, 5)[PREDICT].parent_id == f"{context.span_id:016x}"


def test_a_new_trace_is_sampled_by_the_share_and_its_id_shows_in_the_logs(
    run_service: Run, chief: Chief, capfd: pytest.CaptureFixture[str]
) -> None:
    chief.publish(STEP)
    from understudy.service import logging

    with otlp_receiver() as receiver:
        service = run_service({"tracing": True, "tracing_endpoint": receiver.url, "tracing_sample": 0.5})
        logging.configure(level="debug", log_format="json")
        service.wait_ready()
        client = service.client()
        for _ in range(64):
            client.predict(ones(1))
        service.start_stopping()
        service.join()

    calls = {span.trace_id: span for span in receiver.spans if span.name == PREDICT}
    assert 12 < len(calls) < 52  # but for one time in a million
    assert all(not span.parent_id and int(trace_id, 16) & (2**64 - 1) < 2**63 for trace_id, span in calls.items())
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    logged = [line for line in lines if line.get("event") == "call ended" and line["method"] == f"/{PREDICT}"]
    assert len(logged) == 64
    assert {line["trace_id"]: line["span_id"] for line in logged if "trace_id" in line} == {
        trace_id: span.span_id for trace_id, span in calls.items()
    }


def outcome(service: RunningService, kind: str) -> float:
    return service.metric("understudy_trace_spans_total", outcome=kind)


def test_a_receiver_that_hangs_costs_spans_and_no_answers(
    run_service: Run, chief: Chief, monkeypatch: pytest.MonkeyPatch
) -> None:
    chief.publish(STEP)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "20")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with otlp_receiver() as receiver:
        receiver.answering.clear()
        service = run_service({"tracing": True, "tracing_endpoint": receiver.url, "tracing_sample": 1.0})
        service.wait_ready()
        client = service.client()
        began = time.monotonic()
        for _ in range(50):
            assert client.predict(ones(1)).step == STEP
        assert time.monotonic() - began < 40  # each would wait for the receiver otherwise
        until(lambda: outcome(service, "dropped") > 0 and outcome(service, "failed") > 0)
        began = time.monotonic()
        service.start_stopping()
        service.join()
        assert time.monotonic() - began < 15


def test_a_receiver_that_is_gone_costs_spans_and_no_answers(run_service: Run, chief: Chief) -> None:
    chief.publish(STEP)
    with otlp_receiver() as receiver:
        url = receiver.url
    service = run_service({"tracing": True, "tracing_endpoint": url, "tracing_sample": 1.0})
    service.wait_ready()
    for _ in range(10):
        service.client().predict(ones(1))
    began = time.monotonic()
    service.start_stopping()
    service.join()
    assert time.monotonic() - began < 15


def test_the_variables_of_opentelemetry_choose_the_sampler_and_the_receiver(
    run_service: Run, chief: Chief, monkeypatch: pytest.MonkeyPatch
) -> None:
    chief.publish(STEP)
    with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")  # does not heed callers
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1.0")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        service = run_service({"tracing": True})
        service.wait_ready()
        service.client().predict(ones(1), metadata=[("traceparent", NOT_SAMPLED.format(9))])
        service.client().predict(ones(1))

        assert PREDICT in in_trace(receiver, 9, 5)
        receiver.wait_for(lambda spans: sum(span.name == PREDICT for span in spans) == 2)


def test_nothing_is_recorded_where_opentelemetry_is_disabled(
    run_service: Run, chief: Chief, monkeypatch: pytest.MonkeyPatch
) -> None:
    chief.publish(STEP)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    service = run_service({"tracing": True, "tracing_sample": 1.0})
    service.wait_ready()
    service.client().predict(ones(1), metadata=[("traceparent", SAMPLED.format(10))])

    assert "understudy_trace_spans" not in service.client().metrics()


def test_a_checkpoint_has_one_trace_from_its_commit_to_its_replacement(
    run_service: Run, chief: Chief, dataset_file: Path
) -> None:
    with otlp_receiver() as receiver:
        settings = {"tracing": True, "tracing_endpoint": receiver.url, "tracing_sample": 0.0}
        service = run_service(
            {**settings, "eval_data": {"test": dataset_file}},
            {"version_policy": "best", "gate": ("test/loss <= 1000",)},
        )
        for step in (STEP, BETTER):
            chief.publish(step)
            until(lambda: service.client().status().serving_step == step)  # noqa: B023 - it is called at once
        receiver.wait_for(lambda spans: any(span.name == "replaced" for span in spans))

    roots = {span.attributes["understudy.step"]: span for span in receiver.spans if span.name == "checkpoint"}
    assert roots.keys() == {STEP, BETTER}
    first = [span for span in receiver.spans if span.trace_id == roots[STEP].trace_id]
    assert roots[STEP].trace_id == f"{trace_id_of(STEP, roots[STEP].attributes['understudy.checkpoint.digest']):032x}"
    assert {span.parent_id for span in first} == {"", roots[STEP].span_id}
    ends = {span.name: span.ended_ns for span in first}
    assert sorted(ends, key=ends.__getitem__) == LIFE
    (scored,) = (span for span in first if span.name == "scored")
    assert scored.attributes["understudy.dataset"] == "test"
    assert scored.attributes["understudy.metric.loss"] >= 0
    assert all(span.began_ns <= span.ended_ns and span.status != ERROR for span in first)


def test_a_checkpoint_that_cannot_be_scored_is_an_error_with_its_reason(
    run_service: Run, chief: Chief, dataset_file: Path
) -> None:
    chief.publish_damaged(STEP, lambda file: file.write_bytes(file.read_bytes()[:-10]))
    with otlp_receiver() as receiver:
        run_service(
            {"tracing": True, "tracing_endpoint": receiver.url, "eval_data": {"test": dataset_file}},
            {"load_attempts": 1},
        )
        spans = receiver.wait_for(lambda spans: any(span.name == "failed" for span in spans))

    (failed,) = (span for span in spans if span.name == "failed")
    assert failed.status == ERROR
    assert failed.message == failed.attributes["understudy.reason"] != ""
    assert "loaded" not in {span.name for span in spans}
