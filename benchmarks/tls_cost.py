"""Measures what TLS costs: predictions per second at 64 connections, with and without it, by turns.

Both front ends serve a small model; h2load keeps one request in flight on each connection. The result is the median of
the ratios of neighbouring turns. Allowed is a loss of 15 %.

    tools/fetch_h2load.sh; PYTHONPATH=tests .venv/bin/python -m benchmarks.tls_cost [--turns 11] [--seconds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import trustme

from benchmarks.speed import h2load
from testkit.certificates import Credentials
from testkit.served import Served, plain_model, publish, serving
from testkit.values import PLAIN, PLAIN_STEPS, values
from understudy.v1 import prediction_pb2
from understudy.wire import encode_all

FRONT_ENDS = ("grpcio", "envoy")
CONNECTIONS = 64
ROWS = 32
ALLOWED_RATIO = 0.85
RESULT = Path(__file__).parent / "results" / "tls_cost.json"


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=11, help="turns with and without TLS, for each front end")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = {front_end: compare(Path(name), front_end, arguments) for front_end in FRONT_ENDS}
    text = json.dumps({"connections": CONNECTIONS, "rows": ROWS, "allowed_ratio": ALLOWED_RATIO, **found}, indent=2)
    print(text)
    RESULT.write_text(text + "\n")


def compare(folder: Path, front_end: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the requests per second without and with TLS, and the median of their ratios."""
    run = folder / front_end
    publish(run, {PLAIN_STEPS[0]: plain_model(PLAIN_STEPS[0])})
    body = run / "request"
    message = prediction_pb2.PredictRequest(inputs=encode_all({"x": values("float32", rows=ROWS)})).SerializeToString()
    body.write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
    credentials = Credentials(folder / "tls", trustme.CA(), "127.0.0.1")
    rates: dict[str, list[float]] = {"plain": [], "tls": []}
    with ExitStack() as stack:
        servers = {
            kind: stack.enter_context(
                serving(run, PLAIN, "--frontend", front_end, "--state-dir", str(run / kind), credentials=chosen)
            )
            for kind, chosen in (("plain", None), ("tls", credentials))
        }
        for _ in range(arguments.turns):
            for kind, served in servers.items():
                rates[kind].append(rate(served, body, arguments.seconds))
    ratios = [tls / plain for plain, tls in zip(rates["plain"], rates["tls"], strict=True)]
    return {**rates, "ratio": round(statistics.median(ratios), 3)}


def rate(served: Served, body: Path, seconds: float) -> float:
    """Return the predictions per second."""
    port, scheme = int(served.grpc.rsplit(":", 1)[1]), "http" if served.credentials is None else "https"
    load = h2load.run(port, body, connections=CONNECTIONS, seconds=seconds, scheme=scheme)
    return round(load.done / load.seconds, 1)


if __name__ == "__main__":
    main()
