"""An honest caller in a process of its own, whose waits nothing but the server prolongs.

    python -m soak.honest_caller ADDRESS [AUTHORITY KEY CERTIFICATE]

It predicts every few milliseconds, until its input ends, and writes a line for each call: when it began, on
`time.monotonic`'s clock, its seconds, and what was wrong with it.
"""

from __future__ import annotations

import bisect
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from testkit.served import Served

PAUSE_SECONDS: Final = 0.005
TIMEOUT_SECONDS: Final = 30.0
WIDTH: Final = 3
_END_SECONDS: Final = 60.0


class HonestCaller:
    """The caller, as its parent sees it. A context manager.

    Args:
        served: The server of a model that multiplies by its step.

    Attributes:
        waits: The seconds of the calls of each phase; complete after the ``with`` block.
        failures: What was wrong with calls.
    """

    def __init__(self, served: Served) -> None:
        files = () if served.credentials is None else (served.credentials.ca, served.credentials.key)
        certificate = () if served.credentials is None else (served.credentials.certificate,)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "soak.honest_caller", served.grpc, *map(str, (*files, *certificate))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        self._phases: list[tuple[float, str]] = [(0.0, "starting")]
        self._reader = threading.Thread(target=self._read)
        self._counted = threading.Condition()
        self.waits: dict[str, list[float]] = defaultdict(list)
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        self._reader.start()
        with self._counted:
            assert self._counted.wait_for(lambda: self.waits, _END_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_END_SECONDS)
        self._reader.join()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the calls that begin in the block to a phase, of which the first is awaited."""
        self._phases.append((time.monotonic(), phase))
        try:
            yield
            with self._counted:
                self._counted.wait_for(lambda: phase in self.waits, _END_SECONDS)
        finally:
            self._phases.append((time.monotonic(), "between"))

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                began, seconds, failure = line.rstrip("\n").split(" ", 2)
                phase = self._phases[bisect.bisect(self._phases, (float(began), "~")) - 1][1]
                with self._counted:
                    self.waits[phase].append(float(seconds))
                    self._counted.notify_all()
                if failure:
                    self.failures.append(f"{phase}: {failure}")


def quantiles(waits: Sequence[float]) -> dict[str, float]:
    """Return the number of waits, and quantiles in milliseconds."""
    ordered = sorted(waits)
    at = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999, "max": 1.0}
    found = {
        name: round(1000 * ordered[min(int(part * len(ordered)), len(ordered) - 1)], 1) for name, part in at.items()
    }
    return {"calls": len(ordered), **found}


def _call(address: str, *files: str) -> None:
    import grpc
    import numpy as np

    from understudy.clients import Client

    contents = [Path(file).read_bytes() for file in files]
    credentials = grpc.ssl_channel_credentials(*contents) if contents else None
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    x = np.arange(WIDTH, dtype=np.float32)[np.newaxis]
    with Client(address, credentials=credentials, timeout_seconds=TIMEOUT_SECONDS) as client:
        client.predict({"x": x}, wait_for_ready=True)
        while not over.wait(PAUSE_SECONDS):
            began, failure = time.monotonic(), ""
            try:
                prediction = client.predict({"x": x})
                if not np.array_equal(prediction.outputs["y"], x * prediction.step):
                    failure = f"step {prediction.step} answered {prediction.outputs['y']}"
            except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
                failure = repr(error).replace("\n", " ")
            print(began, time.monotonic() - began, failure, flush=True)


if __name__ == "__main__":
    _call(*sys.argv[1:])
