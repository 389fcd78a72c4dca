"""What a pass of the watcher does does not depend on how many checkpoints there are."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest

import understudy.checkpoints
import understudy.evaluator
from testkit.watcher_harness import WatcherHarness
from understudy.checkpoints import manifest, run_listing
from understudy.evaluator.types import CheckpointInfo

pytestmark = pytest.mark.usefixtures("logical_cpus")

LISTING = run_listing.__file__
"""The one thing that looks at each checkpoint: the listing of a folder that has changed."""

OURS = tuple(
    f"{Path(path)}{os.sep}" for part in (understudy.checkpoints, understudy.evaluator) for path in part.__path__
)
LONG_AGO_NS = 10**18
FEW, MANY = 80, 300  # a listing reads the status of the newest 64, however many there are


class Operations:
    """Counts what this thread does: instructions of this project's code, and looks at records of checkpoints."""

    def __init__(self) -> None:
        self.instructions = self.looks = 0

    def __enter__(self) -> Self:
        look, thread = object.__getattribute__, threading.get_ident()

        def looking(info: CheckpointInfo, name: str) -> Any:
            self.looks += threading.get_ident() == thread
            return look(info, name)

        CheckpointInfo.__getattribute__ = looking  # type: ignore[assignment, method-assign] # restored below
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        del CheckpointInfo.__getattribute__

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        if file == LISTING or not file.startswith(OURS):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self.instructions += event == "opcode"
        return self._trace


class ManyCheckpoints:
    """A watcher over many checkpoints that are all leased and wait to be evaluated."""

    def __init__(self, harness: WatcherHarness, count: int) -> None:
        self.harness = harness
        self.count = 0
        harness.lifecycle.write(0)
        self._original = harness.lifecycle.run.checkpoint(0)
        self._manifest = manifest.read_manifest(self._original)
        for _ in range(count):
            self.add()
        while not harness.watcher._is_done:
            harness.reconcile()
        self.quiet()

    def add(self) -> None:
        """Commit one more checkpoint. The folder changed long ago, as it is in most polls."""
        self.count += 1
        folder = self.harness.lifecycle.run.checkpoint(self.count)
        folder.mkdir()
        (folder / "model.keras").hardlink_to(self._original / "model.keras")
        (folder / "manifest.json").write_bytes(manifest.encode_manifest(replace(self._manifest, step=self.count)))
        os.utime(folder.parent, ns=(LONG_AGO_NS, LONG_AGO_NS + self.count))

    def quiet(self) -> None:
        """Let the watcher see what changed."""
        for _ in range(3):
            self.harness.reconcile()

    def operations(self, change: Callable[[], object]) -> Operations:
        """Return what a change and the pass after it do."""
        self.quiet()
        self.harness.lifecycle.may_load.clear()  # so that no load ends in the middle of the pass
        with Operations() as operations:
            change()
            self.harness.look()
        self.harness.lifecycle.may_load.set()
        return operations

    def evaluate(self) -> None:
        """Have the next checkpoint loaded and scored."""
        info = self.harness.backlog.next()
        assert info is not None
        for event in (monitor := self.harness.lifecycle.version_monitor).loading, monitor.unloaded:
            event(info.step)
        self.harness.score(info, loss=1.0)
        self.harness.backlog.finished()

    def damage(self) -> None:
        """Have a checkpoint fail to load."""
        info = self.harness.lifecycle.store.info(7)
        self.harness.lifecycle.version_monitor.failed(info, OSError("torn"), seconds=0.0)

    def retry(self) -> None:
        """Let it be due again."""
        self.harness.lifecycle.clock.now += 1


@pytest.mark.parametrize(
    "options",
    [{}, {"serve": "best"}, {"serve": 3}, {"policy": 2}, {"policy": "latest"}, {"min_value": 0.5}, {"datasets": ()}],
    ids=str,
)
def test_a_pass_does_the_same_with_many_checkpoints_as_with_few(
    make_harness: Callable[..., WatcherHarness], tmp_path: Path, options: dict[str, Any]
) -> None:
    done = []
    for count in (FEW, MANY):
        those = ManyCheckpoints(make_harness(folder=tmp_path / str(count), **options), count)
        if len(those.harness.backlog) > 1:
            those.operations(those.evaluate)  # the first is the best from then on
            done.append([those.operations(those.evaluate)])
        else:
            done.append([])
        done[-1] += [those.operations(change) for change in (lambda: None, those.add, those.damage, those.retry)]
    assert [each.looks for each in done[0]] == [each.looks for each in done[1]]
    for few, many in zip(*done, strict=True):  # Python 3.13 does not tell of each instruction that it has specialized
        assert abs(few.instructions - many.instructions) < 2 * (MANY - FEW), "a loop has three for each checkpoint"
    assert all(each.instructions > 0 and each.looks > 0 for each in done[0])
