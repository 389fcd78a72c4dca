"""Every front end as a separate process, and the clients of other servers in their own environments."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testkit.fetched import fetched
from testkit.front_ends import AVAILABLE, FRONT_ENDS
from testkit.preloading import STARTUP, preloaded
from testkit.served import Pair, serving_both
from testkit.values import DTYPES, packed, values
from understudy.clients import Client

ROOT = Path(__file__).parent.parent.parent
CALLS = Path(__file__).parent / "calls"
CALLS_SECONDS = 100

Fetch = Callable[[str], Path]
Serve = Callable[[str], Pair]
Report = dict[str, Any]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Return a function that starts the servers of a front end, once per session, whatever the order of tests."""
    started: dict[str, Pair] = {}
    with ExitStack() as stack:

        def serve(front_end: str) -> Pair:
            if front_end not in started:
                folder = tmp_path_factory.mktemp(front_end)
                started[front_end] = stack.enter_context(
                    serving_both(folder, "--frontend", front_end, environ=preloaded())
                )
            return started[front_end]

        yield serve


@pytest.fixture(scope="session", params=FRONT_ENDS)
def served(request: pytest.FixtureRequest, serve: Serve) -> Pair:
    return serve(request.param)


@pytest.fixture(scope="session")
def native_plain(served: Pair) -> Iterator[Client]:
    with Client(served.plain.grpc) as client:
        yield client


@pytest.fixture(scope="session")
def native_answer(served: Pair) -> dict[str, list[str]]:
    """The native client's result for `values` of every dtype, by dtype."""
    with Client(served.every.grpc) as client:
        outputs = client.predict({f"in_{dtype}": values(dtype) for dtype in DTYPES}).outputs
    return {dtype: packed(outputs[f"out_{dtype}"]) for dtype in DTYPES}


@pytest.fixture(scope="session")
def fetch() -> Fetch:
    """Return a function that installs a client into its own environment, once per session, and returns the path."""
    return fetched


def report_of(program: Path | str, *arguments: str | Path) -> Report:
    """Run a program of another environment and return the JSON it prints last."""
    completed = subprocess.run(
        [program, *arguments],
        capture_output=True,
        text=True,
        timeout=CALLS_SECONDS,
        check=False,
        cwd=CALLS,
        env={**os.environ, "PYTHONPATH": f"{STARTUP}{os.pathsep}{ROOT / 'tests'}", "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    report: Report = json.loads(completed.stdout.splitlines()[-1])
    return report


@functools.cache
def triton_report(way: str, served: Pair, fetch: Fetch) -> Report:
    """Return tritonclient's outcomes for the servers, over gRPC or HTTP."""
    addresses = [getattr(server, way) for server in (served.every, served.plain)]
    return report_of(fetch("triton") / "bin" / "python", "triton.py", way, *addresses)


@pytest.fixture(scope="session")
def triton_grpc(fetch: Fetch, served: Pair) -> Report:
    return triton_report("grpc", served, fetch)


@pytest.fixture(scope="session")
def triton_http(fetch: Fetch, served: Pair) -> Report:
    return triton_report("http", served, fetch)


@pytest.fixture(scope="session")
def tf_serving_reports(fetch: Fetch, serve: Serve) -> dict[str, Report]:
    """The outcomes of TensorFlow Serving's stubs by server. One process has them all, as it imports TensorFlow."""
    pairs = [serve(front_end) for front_end in AVAILABLE]
    targets = [server.grpc for pair in pairs for server in (pair.every, pair.plain)]
    return report_of(fetch("tfserving") / "bin" / "python", "tfserving.py", *targets)


@pytest.fixture(scope="session")
def tf_serving(served: Pair, tf_serving_reports: dict[str, Report]) -> Report:
    return tf_serving_reports[served.every.grpc]
