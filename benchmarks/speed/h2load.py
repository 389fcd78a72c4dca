"""Runs h2load, nghttp2's load generator, and parses its output.

It ignores grpc-status: compare the size of the answers. Only a run in which all requests were refused is noticed here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.speed.processes import BenchmarkError
from benchmarks.speed.wire import METHOD

WARM_UP_SECONDS = 0.3
"""How much of the beginning of a run is not counted."""

_FETCHED = Path(__file__).parents[2] / ".tools" / "nghttp2" / "usr"
_GRACE_SECONDS = 30.0
_HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")
_COUNTS = ("done", "succeeded", "failed", "errored", "timeout")
_DONE = re.compile(r"^requests: .* " + ", ".join(rf"(\d+) {count}" for count in _COUNTS), re.MULTILINE)
_DATA = re.compile(r"^traffic: .*\((\d+)\) data", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The result of one run of h2load. The counts are with the warm-up, the seconds and the latencies without."""

    done: int
    data_bytes: int
    seconds: float
    latencies_ms: npt.NDArray[np.float64]

    @property
    def requests_per_second(self) -> float:
        """The rate, without the warm-up."""
        return len(self.latencies_ms) / self.seconds

    @property
    def reply_bytes(self) -> float:
        """The mean size of an answer, frames included; 0 for an error in the trailers alone."""
        return self.data_bytes / self.done


def find() -> Path | None:
    """Return h2load, on PATH or where tools/fetch_h2load.sh puts it, or None."""
    found = shutil.which("h2load") or shutil.which("h2load", path=str(_FETCHED / "bin"))
    return Path(found) if found else None


def run(port: int, body: Path, *, connections: int, seconds: float, method: str = METHOD, scheme: str = "http") -> Load:
    """Load a server on this machine in a closed loop: one request in flight on each connection.

    ``body`` is a file with the framed request. With the scheme ``https``, the certificate is not checked. Raises
    BenchmarkError if there is no h2load, it fails, or requests fail.
    """
    program = find()
    if program is None:
        raise BenchmarkError("there is no h2load; tools/fetch_h2load.sh fetches it")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests"
        options = ("-t", "1", "-m", "1", "-c", str(connections), "-D", f"{round(1000 * (seconds + WARM_UP_SECONDS))}ms")
        url = f"{scheme}://127.0.0.1:{port}{method}"
        command = [str(program), *options, *_HEADERS, "-d", str(body), "--log-file", str(log), url]
        output = _output(command, timeout_seconds=seconds + _GRACE_SECONDS)
        return read(output, log.read_text(), seconds=seconds)


def read(output: str, log: str, *, seconds: float) -> Load:
    """Parse h2load's output and its log of requests; raise BenchmarkError if nothing was answered, or requests failed.

    A line of the log has microseconds since the epoch, the HTTP status, and the microseconds it took.
    """
    done, data = _DONE.search(output), _DATA.search(output)
    if done is None or data is None:
        raise BenchmarkError(f"h2load printed no result: {output[-500:]}")
    if not log.strip():
        raise BenchmarkError(f"no request was answered in {seconds} s; measure for longer")
    if not int(data.group(1)):
        raise BenchmarkError("no response has a message: all requests were refused")
    counts = [int(count) for count in done.groups()]
    if sum(counts[2:]):
        raise BenchmarkError(f"{sum(counts[2:])} of {counts[0]} requests failed: {done.group()}")
    rows = np.array([line.split("\t") for line in log.splitlines()], dtype=np.int64)
    began, took = rows[:, 0], rows[:, 2]
    counted = began + took >= began.min() + WARM_UP_SECONDS * 1e6
    return Load(
        done=counts[0], data_bytes=int(data.group(1)), seconds=seconds, latencies_ms=took[counted].astype(float) / 1e3
    )


def _output(command: Sequence[str], *, timeout_seconds: float) -> str:
    libraries = ":".join(str(folder) for folder in (_FETCHED / "lib").glob("*-linux-gnu"))
    environ = {"LD_LIBRARY_PATH": libraries} if command[0].startswith(str(_FETCHED)) else {}
    try:
        ended = subprocess.run(
            command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"h2load did not end within {timeout_seconds} s") from error
    if ended.returncode:
        raise BenchmarkError(f"h2load ended with {ended.returncode}: {ended.stdout[-500:]}{ended.stderr[-500:]}")
    return ended.stdout
