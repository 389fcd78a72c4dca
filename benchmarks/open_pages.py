"""Measures what open pages cost a service, and how soon a page is there over a long ledger.

    PYTHONPATH=tests python -m benchmarks.open_pages [--pages 200] [--seconds 30] [--entries 100000] [--every 5]

Starts ``understudy serve`` on two small checkpoints and a ledger of many scores. Times the first page, and takes the
processor time of the server with pages that are updated as a browser's are, while another step is served every few
seconds, and without pages. Writes ``benchmarks/results/open_pages.json``. On a busy machine CPU seconds hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sqlite3
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import tensorflow as tf

from testkit.onlookers import follow_page
from testkit.served import plain_model, publish, serving
from testkit.values import PLAIN
from understudy.clients import Client
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord

RESULTS = Path(__file__).parent / "results" / "open_pages.json"
_SETTLING_SECONDS = 300.0
_COLUMNS = "checkpoint_digest, dataset, dataset_digest, outcome, reason, examples, duration_seconds, recorded_at, notes"


def _fill(run: Path, entries: int, steps: tuple[int, int]) -> None:
    """Write two checkpoints, and a ledger of scores of many steps with the other files that belong to it."""
    publish(run, {step: plain_model(step) for step in steps})
    results = run / "evaluator" / "results"
    results.mkdir(parents=True)
    ledger = Ledger(results.parent / "ledger.sqlite")
    scored = EvaluationOutcome.SCORED
    ledger.append(EvaluationRecord(step=0, checkpoint_digest="d", dataset="test", outcome=scored, metrics={"loss": 1}))
    ledger.close()
    metrics = "json_object('loss', abs(random() % 1000) / 1e3, 'accuracy', abs(random() % 1000) / 1e3)"
    with contextlib.closing(sqlite3.connect(results.parent / "ledger.sqlite")) as connection, connection:
        connection.execute(
            f"WITH RECURSIVE steps(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM steps WHERE n < {entries - 1}) "  # noqa: S608
            f"INSERT INTO evaluations (step, metrics, {_COLUMNS}) "
            f"SELECT n, {metrics}, {_COLUMNS} FROM steps, evaluations WHERE step = 0",
        )
    summaries = results.parent / "tensorboard" / "test"
    summaries.mkdir(parents=True)
    with tf.io.TFRecordWriter(str(summaries / "events.out.tfevents.0")) as writer:
        for step in range(entries):
            (results / f"{step:012d}.json").touch()
            values = [tf.compat.v1.Summary.Value(tag=name, simple_value=0.5) for name in ("loss", "accuracy")]
            event = tf.compat.v1.Event(step=step, summary=tf.compat.v1.Summary(value=values))
            writer.write(event.SerializeToString())


async def _with_pages(
    target: str, address: str, server: psutil.Process, options: argparse.Namespace
) -> dict[str, float]:
    """Return the server's processor time with pages open, after all have opened."""
    counts: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=300.0) as client:
        opened = [asyncio.create_task(follow_page(client, counts)) for _ in range(options.pages)]
        while counts["open"] < options.pages:  # noqa: ASYNC110 - coarse enough
            await asyncio.sleep(0.5)
        await _settled(server)
        cpu, began, before = _cpu(server), time.monotonic(), Counter(counts)
        with Client(target) as acting:
            while time.monotonic() - began < options.seconds:
                counts["changes"] += 1
                await asyncio.to_thread(acting.promote, _steps(options)[counts["changes"] % 2])
                await asyncio.sleep(options.every)
        cpu, seconds, more = _cpu(server) - cpu, time.monotonic() - began, counts - before
        for task in opened:
            task.cancel()
        await asyncio.gather(*opened, return_exceptions=True)
    per_page = {f"{name}_per_page": round(more[name] / options.pages, 1) for name in ("events", "bytes")}
    return {"changes": more["changes"], "cpu_seconds": round(cpu, 2), "cpu_share": round(cpu / seconds, 3), **per_page}


def _steps(options: argparse.Namespace) -> tuple[int, int]:
    """Return two steps within the charts, which change when another one is served."""
    return options.entries // 3, options.entries // 2


def _cpu(server: psutil.Process) -> float:
    return float(sum(server.cpu_times()[:2]))


async def _settled(server: psutil.Process) -> None:
    """Wait until the server does nothing by itself any more."""
    ends, before = time.monotonic() + _SETTLING_SECONDS, 0.0
    while time.monotonic() < ends and _cpu(server) - before > 0.5:
        before = _cpu(server)
        await asyncio.sleep(5.0)


def _load(address: str, server: psutil.Process) -> dict[str, float]:
    """Return what a page costs."""
    before, began = _cpu(server), time.monotonic()
    size = len(httpx.get(f"{address}/", timeout=60.0).raise_for_status().content)
    seconds, cpu = time.monotonic() - began, _cpu(server) - before
    return {"seconds": round(seconds, 3), "cpu_seconds": round(cpu, 2), "bytes": size}


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Return the measured numbers."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        _fill(run, options.entries, _steps(options))
        with serving(run, PLAIN, "--max-connections", "4096", "--no-self-tuning") as served:
            server, address = psutil.Process(served.pid), f"http://{served.http}"
            first, second = _load(address, server), _load(address, server)
            opened = asyncio.run(_with_pages(served.grpc, address, server, options))
            before = _cpu(server)
            time.sleep(options.seconds)
            alone = (_cpu(server) - before) / options.seconds
    return {**vars(options), "first": first, "second": second, "cpu_share_alone": round(alone, 3), "with_pages": opened}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--every", type=float, default=5.0, help="the seconds between two changes")
    result = json.dumps(measure(parser.parse_args()), indent=2)
    print(result)
    RESULTS.write_text(f"{result}\n", encoding="utf-8")
