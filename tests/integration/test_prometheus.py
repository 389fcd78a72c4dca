"""The metrics, as the real Prometheus sees them."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from testkit.checkpoints import ones
from testkit.in_process import RunningService, until
from testkit.prometheus_tools import tool

CONFIGURATION = """
global:
  scrape_interval: 200ms
  scrape_timeout: 200ms
scrape_configs:
  - job_name: understudy
    static_configs:
      - targets: ["{target}"]
"""


@pytest.fixture
def prometheus(service: RunningService, tmp_path: Path) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the service."""
    program = tool("prometheus")
    configuration = tmp_path / "prometheus.yml"
    configuration.write_text(CONFIGURATION.format(target=service.http))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [
            program,
            f"--config.file={configuration}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address={address}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(base_url=f"http://{address}") as client:
            yield client
    finally:
        process.terminate()
        process.wait(20)


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


def value_of(prometheus: httpx.Client, query: str) -> float | None:
    """Return what a query for one series gives now, or None if there is nothing yet."""
    try:
        answer = prometheus.get("/api/v1/query", params={"query": query}).raise_for_status()
    except httpx.HTTPError:  # it has not started yet
        return None
    found = answer.json()["data"]["result"]
    return float(found[0]["value"][1]) if found else None
