"""The metrics, as the real Prometheus sees them."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from integration.conftest import Run, with_grpcio

from testkit.checkpoints import Chief, ones
from testkit.in_process import RunningService, until
from testkit.prometheus_tools import dashboard_queries, scraping, tool, value_of

pytestmark = pytest.mark.long


@pytest.fixture
def prometheus(service: RunningService, tmp_path: Path) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the service."""
    with scraping(service.http, tmp_path) as client:
        yield client


@with_grpcio
def test_promtool_accepts_what_the_service_shows(service: RunningService) -> None:
    text = httpx.get(f"http://{service.http}/metrics").content
    checked = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=text, capture_output=True, timeout=30, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


@with_grpcio
def test_a_real_prometheus_scrapes_the_service(service: RunningService, prometheus: httpx.Client) -> None:
    service.client().predict(ones(3))
    until(lambda: value_of(prometheus, "understudy_serving_step") == 30)
    until(lambda: (value_of(prometheus, 'understudy_examples_total{operation="predict"}') or 0) >= 3)
    assert value_of(prometheus, 'up{job="understudy"}') == 1
    assert value_of(prometheus, 'understudy_evaluation_metric{dataset="test", metric="loss"}') is not None
    assert value_of(prometheus, 'sum(grpc_server_handled_total{grpc_method="Predict", grpc_code="OK"})') != 0


def test_every_query_of_the_dashboards_has_data(
    run_service: Run, chief: Chief, dataset_file: Path, tmp_path: Path
) -> None:
    chief.publish(10)
    service = run_service({"eval_data": {"test": dataset_file}})
    with scraping(service.http, tmp_path) as prometheus:
        service.wait_ready()
        until(lambda: value_of(prometheus, "understudy_serving_step") == 10)
        client = service.client()
        chief.publish(20)
        until(lambda: value_of(prometheus, "understudy_checkpoint_served_seconds_count") == 1)
        until(lambda: value_of(prometheus, "understudy_checkpoint_scored_seconds_count") == 1)
        client.predict(ones(3))
        missing = [*dashboard_queries("serving"), *dashboard_queries("evaluation")]

        def all_have_data() -> bool:
            missing[:] = [query for query in missing if not is_number(value_of(prometheus, query))]
            return not missing

        until(all_have_data)


def is_number(value: float | None) -> bool:
    return value is not None and not math.isnan(value)
