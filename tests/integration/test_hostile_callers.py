"""What callers have been seen to do to a server: each is refused by name, and the server goes on as before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet, ref

import grpc
import numpy as np
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from integration.conftest import Run, with_grpcio

from testkit.checkpoints import OUTPUTS, Chief, ones
from testkit.in_process import RunningService, until
from testkit.living import living
from understudy.clients import Client
from understudy.evaluator.evaluation.resample_memory import ResampleMemory
from understudy.evaluator.model.reclaiming import MemoryTrimmer
from understudy.evaluator.serving.servable import Servable
from understudy.service.calls.parsing import LARGE_BYTES
from understudy.service.handlers import messages
from understudy.service.handlers.paging import Place, encode_token
from understudy.v1 import evaluation_pb2, evaluation_pb2_grpc
from understudy.wire import encode

SECONDS = 30.0

FUNCTION = '{"fn": {"module": "keras.config", "class_name": "function", "config": "%s", "registered_name": "%s"}}'


def batch(rows: int = 4) -> evaluation_pb2.EvaluateRequest:
    targets = {"targets": encode(np.ones((rows, OUTPUTS), np.float32))}
    return evaluation_pb2.EvaluateRequest(
        batch=evaluation_pb2.EvaluateBatch(inputs={"x": encode(ones(rows))}, targets=targets)
    )


def metrics(name: str, config: str = "", times: int = 1) -> evaluation_pb2.EvaluateRequest:
    request = evaluation_pb2.EvaluateRequest()
    for _ in range(times):
        request.options.metrics.add(name=name, config_json=config)
    return request


def empty_batch() -> evaluation_pb2.EvaluateRequest:
    request = batch()
    for tensor in (request.batch.inputs["x"], request.batch.targets["targets"]):
        tensor.content = b""
        tensor.shape[:] = [2**40, 0]
    return request


@pytest.fixture
def stub(service: RunningService) -> Iterator[Any]:
    with grpc.insecure_channel(service.grpc) as channel:
        yield evaluation_pb2_grpc.EvaluationServiceStub(channel)


@with_grpcio
@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([metrics("MeanMetricWrapper", FUNCTION % ("set_epsilon", "set_epsilon"))], "MeanMetricWrapper"),
        ([metrics("function")], "function"),
        ([metrics("5")], "'5'"),
        ([metrics("AUC", '{"num_thresholds": 60000000}')], "num_thresholds"),
        ([metrics("AUC", "[" * 60_000)], "not JSON"),
        ([metrics("mae", times=40)], "40 metrics"),
        ([empty_batch()], "every axis of a batch"),
    ],
)
def test_what_would_write_falsify_or_exhaust_is_the_callers_error(
    client: Client, stub: Any, requests: list[Any], words: str
) -> None:
    before = client.evaluate([(ones(4), np.ones((4, OUTPUTS), np.float32))]).metrics
    with pytest.raises(grpc.RpcError, match=words) as raised:
        stub.Evaluate(iter([*requests, batch()]), timeout=SECONDS)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert client.evaluate([(ones(4), np.ones((4, OUTPUTS), np.float32))]).metrics == before


@with_grpcio
def test_a_page_token_beyond_the_ledger_is_the_callers_error(stub: Any) -> None:
    for sequence in (2**63, 2**64 - 1):
        token = encode_token(Place(sequence=sequence, recorded_at=Timestamp()), b"")
        with pytest.raises(grpc.RpcError, match="page_token") as raised:
            stub.ListEvaluations(evaluation_pb2.ListEvaluationsRequest(page_token=token), timeout=SECONDS)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@with_grpcio
def test_a_place_that_the_ledger_has_not_reached_is_the_callers_error(client: Client, stub: Any) -> None:
    """The ledger was restored or begun anew, and a watch that went on there would pass its next entries over."""
    last = max(each.sequence for each in client.list_evaluations())
    beyond = Place(sequence=last + 1, recorded_at=Timestamp())
    page = evaluation_pb2.ListEvaluationsRequest(page_token=encode_token(beyond, b""))
    watch = evaluation_pb2.WatchEvaluationsRequest(after_sequence=last + 1)
    refusal = f"the newest entry of the ledger is {last}"
    with pytest.raises(grpc.RpcError, match=refusal) as paged:
        stub.ListEvaluations(page, timeout=SECONDS)
    with pytest.raises(grpc.RpcError, match=refusal) as watched:
        next(stub.WatchEvaluations(watch, timeout=SECONDS))
    assert {each.value.code() for each in (paged, watched)} == {grpc.StatusCode.INVALID_ARGUMENT}


@with_grpcio
def test_a_place_whose_entry_is_another_one_now_is_the_callers_error(stub: Any) -> None:
    """The ledger was begun anew, and is as long again already."""
    first, second, *_ = stub.ListEvaluations(evaluation_pb2.ListEvaluationsRequest(), timeout=SECONDS).evaluations
    place = {"after_sequence": first.sequence, "after_recorded_at": first.recorded_at}
    same = evaluation_pb2.WatchEvaluationsRequest(**place)
    assert next(stub.WatchEvaluations(same, timeout=SECONDS)).evaluation == second
    token = encode_token(Place(sequence=first.sequence, recorded_at=first.recorded_at), b"")
    page = stub.ListEvaluations(evaluation_pb2.ListEvaluationsRequest(page_token=token), timeout=SECONDS)
    assert page.evaluations[0] == second

    place["after_recorded_at"] = second.recorded_at
    other = evaluation_pb2.WatchEvaluationsRequest(**place)
    token = encode_token(Place(sequence=first.sequence, recorded_at=second.recorded_at), b"")
    refusal = f"entry {first.sequence}, which is another one now"
    with pytest.raises(grpc.RpcError, match=refusal) as watched:
        next(stub.WatchEvaluations(other, timeout=SECONDS))
    with pytest.raises(grpc.RpcError, match=f"page_token .*{refusal}") as paged:
        stub.ListEvaluations(evaluation_pb2.ListEvaluationsRequest(page_token=token), timeout=SECONDS)
    assert {each.value.code() for each in (paged, watched)} == {grpc.StatusCode.INVALID_ARGUMENT}


@with_grpcio
def test_a_page_of_the_ledger_is_built_beside_the_event_loop(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of records with a thousand slices each takes 0.4 s."""
    own = messages.record
    are_beside: list[bool] = []

    def recorded(entry: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            are_beside.append(True)
        else:
            are_beside.append(False)
        return own(entry)

    monkeypatch.setattr(messages, "record", recorded)
    assert stub.ListEvaluations(evaluation_pb2.ListEvaluationsRequest(), timeout=SECONDS).evaluations
    assert are_beside
    assert all(are_beside)


def test_the_resamples_of_all_evaluations_share_one_bound(
    chief: Chief, run_service: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.evaluator.evaluation.on_demand.ResampleMemory", lambda: ResampleMemory(2**16))
    chief.publish(10)
    service = run_service()
    service.wait_ready()
    over = threading.Event()
    options = evaluation_pb2.EvaluateRequest(options=evaluation_pb2.EvaluateOptions(resamples=1000))

    def held() -> Iterator[evaluation_pb2.EvaluateRequest]:
        yield options
        for _ in range(2):
            yield batch(rows=4096)  # so many that it does not wait for others
        over.wait(SECONDS)

    with grpc.insecure_channel(service.grpc) as channel:
        stub = evaluation_pb2_grpc.EvaluationServiceStub(channel)
        calls = [stub.Evaluate.future(held(), timeout=SECONDS) for _ in range(5)]
        until(lambda: any(call.done() for call in calls))
        over.set()
        codes = {call.code() for call in calls}
        assert codes == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        (refused, *_) = (call for call in calls if call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert "the resamples of evaluations hold" in refused.details()
        assert stub.Evaluate(iter([options, batch()]), timeout=SECONDS).score.intervals


def test_a_stream_that_waits_for_its_caller_keeps_nothing_of_its_batches(
    chief: Chief, run_service: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ref[Any]] = []
    own = messages.batch

    def recorded(message: Any, contents: Any) -> Any:
        decoded = own(message, contents)
        made.extend(map(ref, (decoded, *contents.values())))
        return decoded

    monkeypatch.setattr(messages, "batch", recorded)
    chief.publish(10)
    service = run_service()
    service.wait_ready()
    over = threading.Event()
    large = batch()
    large.batch.features["unused"].CopyFrom(encode(np.zeros((4, LARGE_BYTES // 3), np.uint8)))

    def quiet() -> Iterator[evaluation_pb2.EvaluateRequest]:
        yield large
        over.wait(SECONDS)

    with grpc.insecure_channel(service.grpc) as channel:
        call = evaluation_pb2_grpc.EvaluationServiceStub(channel).Evaluate.future(quiet(), timeout=SECONDS)
        until(lambda: len(made) > 1 and not any(each() is not None for each in made))
        over.set()
        assert call.result().score.examples == 4


@pytest.fixture
def servables() -> Iterator[WeakSet[Servable]]:
    with living(Servable) as servables:
        yield servables


def test_streams_that_say_little_do_not_keep_a_new_checkpoint_from_being_served(
    chief: Chief, servables: WeakSet[Servable], run_service: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.evaluator.evaluation.servable_stream.RECALL_TO_SERVE_SECONDS", 0.1)
    chief.publish(10)
    service = run_service()
    service.wait_ready()
    over = threading.Event()

    def quiet() -> Iterator[evaluation_pb2.EvaluateRequest]:
        yield batch()
        over.wait(SECONDS)
        yield batch()

    def until_served(step: int) -> None:
        until(lambda: service.client().status().serving_step == step)

    with grpc.insecure_channel(service.grpc) as channel:
        stub = evaluation_pb2_grpc.EvaluationServiceStub(channel)
        calls = []
        for held, step in enumerate((10, 20), start=1):
            calls.append(stub.Evaluate.future(quiet(), timeout=SECONDS))
            until(lambda held=held: sum(each.handles for each in servables) == held)  # type: ignore[misc]  # bound now
            chief.publish(step + 10)
            until_served(step + 10)
        chief.publish(40)
        until_served(40)
        over.set()
        codes = [str(call.code()) for call in calls]
    assert "StatusCode.ABORTED" in codes


def test_freed_memory_is_given_back_again_and_again(
    chief: Chief, run_service: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[MemoryTrimmer] = []
    monkeypatch.setattr("understudy.service.server.TRIM_SECONDS", 0.05)
    monkeypatch.setattr(MemoryTrimmer, "trim_if_grown", lambda trimmer: looks.append(trimmer))  # noqa: PLW0108 - becomes a method
    chief.publish(10)
    run_service().wait_ready()
    until(lambda: any(looks.count(trimmer) > 2 for trimmer in looks))
