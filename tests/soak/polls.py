"""The processor time of polls of a run folder and of passes of the watcher, by the number of checkpoints.

Every checkpoint is leased and waits to be scored, as with ``--eval-data``; the checkpoints are lines of text, which no
device loads. It takes the processor time of the thread: of a poll and of a pass when nothing has changed, after a
checkpoint was published, and after one was scored; and of the first passes, until everything is leased, per checkpoint.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from testkit.watcher_harness import WatcherHarness
from understudy.checkpoints import RunSource
from understudy.checkpoints.layout import MANIFEST_FILE, MAX_STEP, MODEL_FILE
from understudy.checkpoints.manifest import encode_manifest, read_manifest

if TYPE_CHECKING:
    from soak.trial import Trial

MOST: Final = 100_000
FEW: Final = 10
CONSTANT: Final = ("poll_us", "pass_us", "pass_after_score_us")
"""The figures that do not grow with the number of checkpoints."""
MAX_RATIO: Final = 3.0
"""How much longer these may take with many checkpoints: a busy machine disturbs them."""

_REPEATS = 9
_LONG_AGO_NS = 10**18
_LINKS = 20_000


class _Run:
    """A watcher over a run folder of many checkpoints."""

    def __init__(self, folder: Path, count: int) -> None:
        self.harness = WatcherHarness(folder)
        self.harness.lifecycle.write(0)
        self.dir = self.harness.lifecycle.run
        self._original = self.dir.checkpoint(0)
        self._model = self._original / MODEL_FILE
        self._manifest = read_manifest(self._original)
        self._step = self._changes = 0
        for _ in range(count - 1):
            self.publish()

    def publish(self) -> None:
        """Commit a checkpoint: its model is a link, as far as a file may have links."""
        self._step += 1
        if self._step % _LINKS == 0:
            self._model = self._original / f"model-{self._step}"
            shutil.copy(self._original / MODEL_FILE, self._model)
        folder = self.dir.checkpoint(self._step)
        folder.mkdir()
        (folder / MODEL_FILE).hardlink_to(self._model)
        (folder / MANIFEST_FILE).write_bytes(encode_manifest(replace(self._manifest, step=self._step)))
        self._age()

    def begin_another(self) -> None:
        """Begin a checkpoint that is never committed."""
        self.dir.checkpoint(MAX_STEP).mkdir()
        self._age()

    def _age(self) -> None:
        """Have the folder changed long ago, as in most polls."""
        self._changes += 1
        os.utime(self.dir.checkpoints, ns=(_LONG_AGO_NS, _LONG_AGO_NS + self._changes))

    def first_passes_us(self, count: int) -> float:
        """Return the processor time until all checkpoints are leased, per checkpoint."""
        began = time.thread_time()
        while not self.harness.is_done:
            self.harness.reconcile()
        return round((time.thread_time() - began) * 1e6 / count, 1)

    def pass_us(self, before: Callable[[], object]) -> float:
        """Return the median processor time of a pass after something."""

        def prepare() -> None:
            self.harness.reconcile()
            before()

        return _median_us(self.harness.look, before=prepare)


def measure(count: int) -> dict[str, float]:
    """Return the processor times over this many checkpoints, in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(Path(folder), count)
        row = {"checkpoints": count, "first_passes_us_per_checkpoint": run.first_passes_us(count)}
        row["pass_us"] = run.pass_us(lambda: None)
        row["pass_after_publication_us"] = run.pass_us(run.publish)
        row["pass_after_score_us"] = run.pass_us(lambda: run.harness.evaluate_next(loss=1.0))
        source = RunSource(run.dir)
        source.poll()
        while not source.is_complete:
            source.poll()
        row["poll_us"] = _median_us(source.poll)
        row["poll_after_publication_us"] = _median_us(source.poll, before=run.publish)
        run.begin_another()
        source.poll()
        row["poll_with_one_not_committed_us"] = _median_us(source.poll)
        run.harness.close()
        return row


def _median_us(work: Callable[[], object], *, before: Callable[[], object] = lambda: None) -> float:
    times = []
    for _ in range(_REPEATS):
        before()
        began = time.thread_time_ns()
        work()
        times.append((time.thread_time_ns() - began) / 1000)
    return round(statistics.median(times), 1)


def run(trial: Trial) -> None:
    """Measure with few checkpoints, a tenth of the requested number, and that number."""
    most = trial.count(MOST)
    rows: list[dict[str, Any]] = []
    for count in sorted({FEW, max(FEW, most // 10), most}):
        rows.append(measure(count))
        ratios = {name: round(rows[-1][name] / rows[0][name], 2) for name in CONSTANT}
        trial.report(held=max(ratios.values()) <= MAX_RATIO, rows=rows, most_to_few=ratios)
    trial.finish()
