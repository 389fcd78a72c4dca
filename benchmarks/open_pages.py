"""Measures what open pages cost a service, and how soon a page is there over a long ledger.

    python -m benchmarks.open_pages [--pages 200] [--seconds 30] [--entries 100000] [--every 5]

Starts ``understudy serve`` on two small checkpoints and a ledger of many scores. Times the first page and, of the same
server, the processor time over some seconds: without pages, and with pages that are updated as a browser's are, while
every few seconds another step is served. Prints the numbers, and writes them to
``benchmarks/results/open_pages.json``. On a busy machine compare CPU seconds, which hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import html
import json
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import keras
import psutil

from understudy.checkpoints import CheckpointPublisher, RunDir
from understudy.checkpoints.keras_signature import signature_of
from understudy.checkpoints.layout import MODEL_FILE
from understudy.clients import Client
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.types import EvaluationOutcome

RESULTS = Path(__file__).parent / "results" / "open_pages.json"
_SETTLING_SECONDS = 300.0
_IDLE_SHARE = 0.1
_READY = re.compile(r"READY grpc=(\S+) http=(\S+)")
_STREAM = re.compile(r'sse-connect="([^"]*)"')


def fill(folder: Path, entries: int, steps: tuple[int, int]) -> None:
    """Write two checkpoints, and a ledger of scores of many steps."""
    model = keras.Sequential([keras.Input((4,), name="x"), keras.layers.Dense(3, name="y")])
    model.compile("sgd", "mse")
    for step in steps:
        CheckpointPublisher(RunDir(folder / "run"), keep=len(steps)).publish(
            step, lambda to: model.save(to / MODEL_FILE), epoch=None, final=False, metrics={},
            signature=signature_of(model),
        )  # fmt: skip
    results = folder / "run" / "evaluator" / "results"
    results.mkdir(parents=True)
    file = results.parent / "ledger.sqlite"
    ledger = Ledger(file)
    ledger.append(
        step=0, checkpoint_digest="d", dataset="test", outcome=EvaluationOutcome.SCORED, examples=100,
        metrics={"loss": 0.5, "accuracy": 0.75},
    )  # fmt: skip
    ledger.close()
    columns = "dataset, dataset_digest, outcome, reason, examples, duration_seconds, recorded_at, notes"
    metrics = "json_object('loss', abs(random() % 1000) / 1e3, 'accuracy', abs(random() % 1000) / 1e3)"
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(
            "WITH RECURSIVE steps(step) AS (SELECT 1 UNION ALL SELECT step + 1 FROM steps WHERE step < ?) "  # noqa: S608
            f"INSERT INTO evaluations (step, checkpoint_digest, metrics, {columns}) "
            f"SELECT steps.step, 'd', {metrics}, {columns} FROM steps, evaluations WHERE evaluations.step = 0",
            (entries - 1,),
        )
    for step in range(entries):
        (results / f"{step:012d}.json").touch()


async def _follow(client: httpx.AsyncClient, counts: dict[str, int]) -> None:
    """Do what the scripts of one open page do, until cancelled."""
    page = await client.get("/")
    stream = html.unescape(_STREAM.findall(page.raise_for_status().text)[0])
    counts["open"] += 1
    while True:
        async with client.stream("GET", stream) as response:
            async for line in response.raise_for_status().aiter_lines():
                counts["events"] += line.startswith("event: ")
                counts["bytes"] += len(line)


async def with_pages(
    target: str, address: str, server: psutil.Process, options: argparse.Namespace
) -> dict[str, object]:
    """Return the server's processor time per second with pages open, after all have opened."""
    counts = {"open": 0, "events": 0, "bytes": 0}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=300.0) as client:
        opened = [asyncio.create_task(_follow(client, counts)) for _ in range(options.pages)]
        while counts["open"] < options.pages:  # noqa: ASYNC110 - coarse enough
            await asyncio.sleep(0.5)
        await _settled(server)
        before, began, first = _cpu(server), time.monotonic(), dict(counts)
        changes = 0
        with Client(target) as acting:
            while (elapsed := time.monotonic() - began) < options.seconds:
                changes += 1
                await asyncio.to_thread(acting.promote, _steps(options)[changes % 2])
                await asyncio.sleep(min(options.every, max(0.0, options.seconds - elapsed)))
        cpu, elapsed = _cpu(server) - before, time.monotonic() - began
        for task in opened:
            task.cancel()
        await asyncio.gather(*opened, return_exceptions=True)
    return {
        "cpu_seconds": round(cpu, 2),
        "elapsed_seconds": round(elapsed, 1),
        "cpu_share": round(cpu / elapsed, 3),
        "changes": changes,
        "events_per_page": round((counts["events"] - first["events"]) / options.pages, 1),
        "kib_per_page": round((counts["bytes"] - first["bytes"]) / options.pages / 1024, 1),
    }


def _steps(options: argparse.Namespace) -> tuple[int, int]:
    """Return two steps within the charts, which change when another one is served."""
    return options.entries // 3, options.entries // 2


def _cpu(server: psutil.Process) -> float:
    times = server.cpu_times()
    return float(times.user + times.system)


async def _settled(server: psutil.Process) -> None:
    """Wait until the server does nothing by itself any more."""
    ends = time.monotonic() + _SETTLING_SECONDS
    while time.monotonic() < ends:
        before = _cpu(server)
        await asyncio.sleep(5.0)
        if _cpu(server) - before < _IDLE_SHARE * 5.0:
            return


def _first_page(address: str, server: psutil.Process) -> dict[str, float]:
    before, began = _cpu(server), time.monotonic()
    size = len(httpx.get(f"{address}/", timeout=60.0).raise_for_status().content)
    seconds, cpu = time.monotonic() - began, _cpu(server) - before
    time.sleep(1.0)  # so that the next one is rendered anew
    return {"seconds": round(seconds, 3), "cpu_seconds": round(cpu, 3), "kib": round(size / 1024)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the measured numbers."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        fill(folder, options.entries, _steps(options))
        command = [sys.executable, "-m", "understudy.cli", "serve", "--run-dir", str(folder / "run")]
        command += ["--grpc-port", "0", "--http-port", "0", "--max-connections", "4096", "--no-self-tuning"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            ready = next(match for match in map(_READY.match, process.stdout) if match)
            target, address = ready[1], f"http://{ready[2]}"
            server = psutil.Process(process.pid)
            first = [_first_page(address, server) for _ in range(3)]
            opened = asyncio.run(with_pages(target, address, server, options))
            before, began = _cpu(server), time.monotonic()
            time.sleep(options.seconds)
            alone = (_cpu(server) - before) / (time.monotonic() - began)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    given = {name: getattr(options, name) for name in ("entries", "pages", "seconds", "every")}
    pages = {"first_page": first[0], "later_page": first[-1], "cpu_share_without_pages": round(alone, 3)}
    return {**given, **pages, "with_pages": opened}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--every", type=float, default=5.0, help="the seconds between two changes")
    result = measure(parser.parse_args())
    print(json.dumps(result))
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
