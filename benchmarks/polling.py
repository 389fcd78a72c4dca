"""Measures a poll of a run folder whose checkpoints have not changed: processor time, by the number of checkpoints.

    python -m benchmarks.polling

The folders hold manifests only. It measures polls of unchanged folders, the poll after a checkpoint was published, and
polls while a folder that is not committed is looked at again. Writes ``benchmarks/results/polling.json``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

from understudy.checkpoints import FileEntry, Manifest, RunDir, RunSource
from understudy.checkpoints.layout import MANIFEST_FILE
from understudy.checkpoints.manifest import encode_manifest

COUNTS = (10, 1_000, 100_000)
POLLS = 200
RESULT = Path(__file__).parent / "results" / "polling.json"
_LONG_AGO_NS = 10**18


def main() -> None:
    """Measure each count, and write the result."""
    rows = []
    for count in COUNTS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(RunDir(Path(folder)), count))
            print(json.dumps(rows[-1]), flush=True)
    facts = {"python": platform.python_version(), "processors": len(os.sched_getaffinity(0))}
    RESULT.write_text(json.dumps({"rows": rows, **facts}, indent=2) + "\n")


def measure(run: RunDir, count: int) -> dict[str, float]:
    """Return the median processor time of polls over this many checkpoints, in microseconds."""
    for step in range(count):
        commit(run, step)
    age(run)
    source = RunSource(run)
    source.poll()
    while not source.is_complete:
        source.poll()
    unchanged = median_us(source, POLLS)
    commit(run, count)
    age(run)
    published = median_us(source, 1)
    run.checkpoint(count + 1).mkdir()
    age(run)
    source.poll()
    return {
        "checkpoints": count,
        "unchanged_us": unchanged,
        "published_us": published,
        "one_not_committed_us": median_us(source, POLLS),
    }


def median_us(source: RunSource, polls: int) -> float:
    """Return the median processor time of a poll."""
    seconds = []
    for _ in range(polls):
        began = time.thread_time_ns()
        source.poll()
        seconds.append((time.thread_time_ns() - began) / 1000)
    return round(statistics.median(seconds), 1)


def commit(run: RunDir, step: int) -> None:
    """Make the folder of a checkpoint with a manifest."""
    file = FileEntry(path="model.keras", size_bytes=3, sha256="ab" * 32)
    manifest = dataclasses.replace(_MANIFEST, step=step, files=(file,))
    run.checkpoint(step).mkdir(parents=True)
    (run.checkpoint(step) / MANIFEST_FILE).write_bytes(encode_manifest(manifest))


def age(run: RunDir) -> None:
    """Let the folder have changed long ago, as it is in most polls."""
    os.utime(run.checkpoints, ns=(_LONG_AGO_NS, _LONG_AGO_NS + len(list(run.checkpoints.iterdir()))))


_MANIFEST = Manifest(step=0, epoch=None, created_at=0.0, final=False, digest="d", files=())

if __name__ == "__main__":
    main()
