from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.samples import Sample

from understudy.service.calls.methods import RpcMethod
from understudy.service.calls.metrics import RpcMetrics, samples_of
from understudy.service.calls.status import Code
from understudy.service.live_numbers import LiveReader, quantile


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_quantile_is_linear_within_its_bucket() -> None:
    buckets = {0.1: 50.0, 0.2: 90.0, math.inf: 100.0}

    assert quantile(buckets, 0.5) == pytest.approx(0.1)
    assert quantile(buckets, 0.7) == pytest.approx(0.15)
    assert quantile(buckets, 0.99) == pytest.approx(0.2)
    assert quantile({math.inf: 0.0}, 0.5) is None
    assert quantile({}, 0.5) is None


def test_the_numbers_are_of_the_last_minute_once_there_is_something_to_compare_with() -> None:
    registry, clock = CollectorRegistry(), Clock()
    predict = RpcMethod(service="understudy.v1.PredictionService", name="Predict", rpc_type="unary")
    other = RpcMethod(service="understudy.v1.ModelService", name="Promote", rpc_type="unary")
    metrics = RpcMetrics(registry, [predict, other])
    Gauge("understudy_queue_examples", "-", registry=registry).set(3)
    Gauge("understudy_replicas", "-", registry=registry).set(2)
    Gauge("understudy_device_memory_bytes", "-", ["device", "kind"], registry=registry).labels("CPU", "current").set(7)
    batches = Histogram("understudy_batch_examples", "-", buckets=(1, 2, 4, 8), registry=registry)
    batches.observe(8)
    reader = LiveReader(lambda: samples_of(registry), clock)
    for _ in range(100):
        metrics.of(predict.path).handled(Code.OK, seconds=0.02)
        metrics.of(other.path).handled(Code.OK, seconds=30.0)
    at_first = reader.read()
    clock.seconds += 10
    batches.observe(2)
    for _ in range(20):
        metrics.of(predict.path).handled(Code.UNAVAILABLE, seconds=0.0004)
    later = reader.read()

    assert at_first.window_seconds is None
    assert at_first.rate is None
    assert (at_first.requests, at_first.failed) == (100, 0)
    assert 0.01 <= (at_first.p50_seconds or 0) <= 0.025
    assert (later.window_seconds, later.rate, later.failed, later.requests) == (10, 2.0, 20, 120)
    assert 0.00025 <= (later.p99_seconds or 0) <= 0.0005
    assert 4 < (at_first.batch_p50 or 0) <= 8
    assert 1 < (later.batch_p50 or 0) <= (later.batch_p99 or 0) <= 2
    assert (later.queue_examples, later.replicas, later.memory) == (3, 2, {"CPU": 7})


def test_a_server_that_has_started_again_begins_a_new_window() -> None:
    clock = Clock()
    ended = [100.0, 110.0, 4.0, 24.0]
    reader = LiveReader(lambda: series(ended.pop(0)), clock)
    rates = []
    for _ in range(4):
        rates.append(reader.read().rate)
        clock.seconds += 10

    assert rates == [None, 1.0, None, 2.0]


def series(ended: float) -> list[Sample]:
    labels = {"grpc_method": "Predict", "grpc_code": "OK"}
    gauges = [Sample(name, {}, 1.0) for name in ("understudy_queue_examples", "understudy_replicas")]
    return [Sample("grpc_server_handled_total", labels, ended), *gauges]
