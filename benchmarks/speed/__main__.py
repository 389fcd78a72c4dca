"""Measures the speed of the service, beside its floor and other servers.

    python -m benchmarks.speed [TOPIC...] [--peers] [--rounds N] [--seconds S] [--only NAME,...] [--quick]

Each topic starts its servers on 127.0.0.1, checks one answer of every batch size, measures in interleaved rounds, and
stops all. Its result goes to RESULTS/TOPIC.json (RESULTS/peers_TOPIC.json with --peers); then the tables, the plot
and the goals are regenerated from all results. Leave the machine idle meanwhile: its load before is stored with the
result.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.speed import machine, report
from benchmarks.speed.measuring import Measuring
from benchmarks.speed.processes import BenchmarkError
from benchmarks.speed.servers import peer_versions

TOPICS = {
    "closed_loop": "a constant number of requests in flight: 1 to 64 connections, batches of 1 to 256, two models",
    "real_models": "six models such as users serve, without any option: 1 to 32 connections, batches of 1 and 8",
    "open_loop": "requests that arrive at random: the tail at the same rates for all",
    "evaluating": "Evaluate over gRPC against model.evaluate in process",
    "replicas": "two replicas against one, in process",
    "publishing": "from a commit to the first answer by it, for 10 MB, 200 MB and 1 GB of weights",
    "swapping": "the tail while 200 MB of weights are swapped every second",
    "overload": "five times the load it can bear: what it still answers, how fast it refuses",
}
"""Each is a module of this package with a ``run(measuring)``; the text says what it measures."""

PEER_TOPICS = ("closed_loop", "real_models", "open_loop")
"""The topics that include other servers."""

QUICK = {"rounds": 1, "seconds": 0.5}
ROUNDS = 3
SECONDS, SECONDS_BESIDE_PEERS = 0.6, 1.0


def main() -> int:
    """Measure; return 1 if a measurement failed."""
    arguments = _parser().parse_args()
    full = {"rounds": ROUNDS, "seconds": SECONDS_BESIDE_PEERS if arguments.peers else SECONDS}
    defaults = QUICK if arguments.quick else full
    chosen = arguments.topics or (PEER_TOPICS if arguments.peers else TOPICS)
    trial = arguments.quick or arguments.only
    folder = arguments.results or (report.TRIALS if trial else report.FOLDER)
    failed = False
    for topic in [] if arguments.render else chosen:
        began = time.monotonic()
        print(f"== {topic}: {TOPICS[topic]}", flush=True)
        try:
            result = _measured(topic, arguments, defaults)
        except BenchmarkError as error:
            print(f"{topic} could not be measured: {error}", file=sys.stderr)
            failed = True
            continue
        failed = failed or bool(result.get("failures"))
        result["took_seconds"] = round(time.monotonic() - began)
        report.save(folder, report.name_of(topic, with_peers=arguments.peers), result)
        print(f"== {topic} took {result['took_seconds']} s", flush=True)
    report.write(folder)
    print(f"see {folder}/README.md and goals.md", flush=True)
    return int(failed)


def _measured(topic: str, arguments: argparse.Namespace, defaults: dict[str, Any]) -> dict[str, Any]:
    measured_on = machine.described()
    if arguments.peers:
        measured_on["versions"] |= peer_versions()
    work = Path(tempfile.mkdtemp(prefix=f"understudy-{topic}-"))
    measuring = Measuring(
        rounds=arguments.rounds or int(defaults["rounds"]),
        seconds=arguments.seconds or defaults["seconds"],
        only=tuple(filter(None, arguments.only.split(","))),
        with_peers=arguments.peers,
        work=work,
    )
    options = {"rounds": measuring.rounds, "seconds": measuring.seconds, "only": list(measuring.only)}
    try:
        found = importlib.import_module(f"benchmarks.speed.{topic}").run(measuring)
    except BenchmarkError:
        print(f"what was printed meanwhile is in {work}", file=sys.stderr)
        raise
    shutil.rmtree(work)
    return {"topic": topic, "machine": measured_on, "options": options, **found}


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:13}{text}" for name, text in TOPICS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description=f"{__doc__}\ntopics:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("topics", nargs="*", choices=[*TOPICS, []], metavar="TOPIC", help="by default all")
    parser.add_argument(
        "--peers", action="store_true", help="beside other servers: closed loop, real models and open loop by default"
    )
    parser.add_argument("--rounds", type=int, help=f"measurements of each cell, by default {ROUNDS}")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"of one measurement in a closed loop, by default {SECONDS}, with --peers {SECONDS_BESIDE_PEERS}",
    )
    parser.add_argument("--only", default="", help="words of which a name must hold one: envoy,triton,process")
    parser.add_argument("--quick", action="store_true", help="one round of half a second each: does it run at all?")
    parser.add_argument("--render", action="store_true", help="measure nothing, only write the tables anew")
    parser.add_argument(
        "--results",
        type=Path,
        help="where to write, by default benchmarks/results/speed, with --only or --quick build/speed",
    )
    return parser


def _on_sigterm(_: int, __: FrameType | None) -> None:
    """Exit through every context, which stops all processes."""
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    signal.signal(signal.SIGTERM, _on_sigterm)
    sys.exit(main())
