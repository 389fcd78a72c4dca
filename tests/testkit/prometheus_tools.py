"""The real Prometheus, on PATH or where tools/fetch_prometheus.sh installs it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
FETCHED = ROOT / ".tools" / "prometheus" / "usr" / "bin"
DASHBOARDS = ROOT / "deploy" / "grafana"


def tool(name: str) -> Path:
    """Return one of Prometheus' programs; skip the test if it is missing."""
    found = shutil.which(name) or shutil.which(name, path=str(FETCHED))
    if found is None:
        pytest.skip(f"{name} is neither on PATH nor in {FETCHED}; tools/fetch_prometheus.sh fetches it")
    return Path(found)


@contextmanager
def scraping(target: str, folder: Path, **job: Any) -> Iterator[httpx.Client]:
    """Run a Prometheus that scrapes ``HOST:PORT``; yield a client of its API.

    Args:
        target: What to scrape.
        folder: Where its files go.
        job: More of the scrape configuration.
    """
    program = tool("prometheus")
    configuration = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
        "scrape_configs": [{"job_name": "understudy", "static_configs": [{"targets": [target]}], **job}],
    }
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(configuration), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [
            program,
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
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


def value_of(prometheus: httpx.Client, query: str) -> float | None:
    """Return what a query for one series gives now, or None if there is nothing yet."""
    try:
        answer = prometheus.get("/api/v1/query", params={"query": query}).raise_for_status()
    except httpx.HTTPError:  # it has not started yet
        return None
    found = answer.json()["data"]["result"]
    return float(found[0]["value"][1]) if found else None


def dashboard_queries(name: str) -> list[str]:
    """Return every query of a dashboard in ``deploy/grafana``, for all namespaces and jobs, and the last minute."""
    dashboard = json.loads((DASHBOARDS / f"{name}.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [re.sub(r"\$(namespace|job)\b", ".*", query).replace("$__rate_interval", "1m") for query in queries]
