"""The metrics, as the real Prometheus sees them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from testkit.checkpoints import ones
from testkit.in_process import RunningService, until
from testkit.prometheus_tools import scraping, tool, value_of


@pytest.fixture
def prometheus(service: RunningService, tmp_path: Path) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the service."""
    with scraping(service.http, tmp_path) as client:
        yield client


def test_promtool_accepts_what_the_service_shows(service: RunningService) -> None:
    text = httpx.get(f"http://{service.http}/metrics").content
    checked = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=text, capture_output=True, timeout=30, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_a_real_prometheus_scrapes_the_service(service: RunningService, prometheus: httpx.Client) -> None:
    service.client().predict(ones(3))
    until(lambda: value_of(prometheus, "understudy_serving_step") == 30)
    until(lambda: (value_of(prometheus, 'understudy_examples_total{operation="predict"}') or 0) >= 3)
    assert value_of(prometheus, 'up{job="understudy"}') == 1
    assert value_of(prometheus, 'understudy_evaluation_metric{dataset="test", metric="loss"}') is not None
    assert value_of(prometheus, 'sum(grpc_server_handled_total{grpc_method="Predict", grpc_code="OK"})') != 0
