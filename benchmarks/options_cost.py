"""Measures what TLS, traces or onlookers cost: predictions per second at 64 connections, with and without, by turns.

Both front ends serve a small model; h2load keeps one request in flight on each connection. The results are medians of
ratios to the neighbouring turn without: of the rates, and of those that the server's CPU time would allow, which leave
out what the load generator needs on the same processors. `ALLOWED_RATIOS` has what is allowed.

    tools/fetch_h2load.sh
    PYTHONPATH=tests .venv/bin/python -m benchmarks.options_cost tls|tracing|watched [--turns 11] [--seconds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import trustme

from benchmarks.speed import h2load
from benchmarks.speed.wire import framed
from testkit.certificates import Credentials
from testkit.onlookers import watched
from testkit.otlp_receiver import otlp_receiver
from testkit.served import Served, plain_model, publish, serving
from testkit.values import PLAIN, PLAIN_STEPS, values
from testkit.webhook_receiver import SECRET, receiving
from understudy.v1 import prediction_pb2
from understudy.wire import encode_all

FRONT_ENDS = ("grpcio", "envoy")
CONNECTIONS = 64
ROWS = 32
METHOD = "/understudy.v1.PredictionService/Predict"
ALLOWED_RATIOS = {"tls": {"tls": 0.85}, "tracing": {"1 %": 0.97}, "watched": {"watched": 0.98}}
RESULTS = Path(__file__).parent / "results"

Options = dict[str, tuple[tuple[str, ...], Credentials | None]]
"""For each kind of server its flags and its certificate; the first kind is without."""


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=ALLOWED_RATIOS)
    parser.add_argument("--turns", type=int, default=11, help="turns of each kind, for each front end")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, otlp_receiver() as receiver, receiving() as hook, receiving() as hangs:
        receiver.status = 204  # no content: for requests that are not parsed
        hangs.always = hangs.hang
        traced = ("--tracing", "--tracing-endpoint", receiver.url, "--tracing-sample")
        options: dict[str, Options] = {
            "tls": {"plain": ((), None), "tls": ((), Credentials(Path(name) / "tls", trustme.CA(), "127.0.0.1"))},
            "tracing": {"off": ((), None), "1 %": ((*traced, "0.01"), None), "100 %": ((*traced, "1"), None)},
            "watched": {"off": ((), None), "watched": (("--webhook", hook.url, "--webhook", hangs.url), None)},
        }
        found = {each: compare(Path(name), each, options[arguments.what], arguments) for each in FRONT_ENDS}
    settings = {"connections": CONNECTIONS, "rows": ROWS, "allowed_ratios": ALLOWED_RATIOS[arguments.what]}
    text = json.dumps({**settings, **found}, indent=2)
    print(text)
    (RESULTS / f"{arguments.what}_cost.json").write_text(text + "\n")


def compare(folder: Path, front_end: str, options: Options, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the requests per second of each kind, and the medians of the ratios to the first kind."""
    run = folder / front_end
    publish(run, {PLAIN_STEPS[0]: plain_model(PLAIN_STEPS[0])})
    body = run / "request"
    request = prediction_pb2.PredictRequest(inputs=encode_all({"x": values("float32", rows=ROWS)}))
    body.write_bytes(framed(request.SerializeToString()))
    rates: dict[str, list[float]] = {kind: [] for kind in options}
    per_cpu: dict[str, list[float]] = {kind: [] for kind in options}
    common, environ = ("--frontend", front_end, "--no-self-tuning"), {"UNDERSTUDY_WEBHOOK_SECRET": SECRET}
    with ExitStack() as stack:
        servers = {
            kind: stack.enter_context(
                serving(run, PLAIN, *common, "--state-dir", str(run / kind), *flags, credentials=given, environ=environ)
            )
            for kind, (flags, given) in options.items()
        }
        if "watched" in servers:
            stack.enter_context(watched(servers["watched"].http))
        for turn in range(arguments.turns):
            for kind, served in list(servers.items())[:: -1 if turn % 2 else 1]:
                measure(served, body, arguments.seconds, rates[kind], per_cpu[kind])
    return {"rates": rates, "ratios": ratios(rates), "requests_per_cpu_second": per_cpu, "cpu_ratios": ratios(per_cpu)}


def ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """Return the medians of the ratios to the first kind."""
    without, *others = rates
    return {
        kind: round(statistics.median(b / a for a, b in zip(rates[without], rates[kind], strict=True)), 3)
        for kind in others
    }


def measure(served: Served, body: Path, seconds: float, rates: list[float], per_cpu: list[float]) -> None:
    """Add the predictions per second, and per second of the server's CPU time, both without the warm-up."""
    port, scheme = int(served.grpc.rsplit(":", 1)[1]), "http" if served.credentials is None else "https"
    process, used = psutil.Process(served.pid), []
    warm = threading.Timer(h2load.WARM_UP_SECONDS, lambda: used.append(sum(process.cpu_times()[:2])))
    warm.start()
    load = h2load.run(port, body, connections=CONNECTIONS, seconds=seconds, method=METHOD, scheme=scheme)
    used.append(sum(process.cpu_times()[:2]))
    warm.join()
    rates.append(round(load.requests_per_second, 1))
    per_cpu.append(round(load.requests_per_second * seconds / (used[1] - used[0]), 1))


if __name__ == "__main__":
    main()
