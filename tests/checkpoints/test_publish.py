"""A checkpoint is published as a whole or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.polling import polled
from understudy.checkpoints import (
    AlreadyPublishedError,
    CheckpointPublisher,
    DirectoryLock,
    LockHeldError,
    Manifest,
    RunDir,
    RunSource,
    Signature,
    read_manifest,
)

from .conftest import Publish

_PUBLISHER = """
import sys
from pathlib import Path
from understudy.checkpoints import CheckpointPublisher, RunDir

root, where = Path(sys.argv[1]), sys.argv[2]

def stop_here():
    print("stopped", flush=True)
    sys.stdin.read()

def stop_before_rename(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("000000000002"):
        stop_here()

def write(folder):
    (folder / "model.keras").write_bytes(b"half a mod")
    if where == "writing":
        stop_here()

publisher = CheckpointPublisher(RunDir(root), keep=3)
if where == "renaming":
    sys.addaudithook(stop_before_rename)
publisher.publish(2, write, epoch=0, final=False, metrics={}, signature=None)
"""


def _names(run: RunDir) -> set[str]:
    return {path.name for path in run.checkpoints.iterdir()} - {"lock"}


def _write(folder: Path) -> None:
    (folder / "model.keras").write_bytes(b"the model")


def _publish(publisher: CheckpointPublisher, step: int) -> Manifest:
    return publisher.publish(step, _write, epoch=None, final=False, metrics={}, signature=None)


def test_a_checkpoint_says_what_it_was_told(run: RunDir, signature: Signature) -> None:
    publisher = CheckpointPublisher(run, keep=1)
    manifest = publisher.publish(
        12,
        _write,
        epoch=3,
        final=True,
        metrics={"loss": 0.5},
        signature=signature,
        versions={"keras": "3"},
    )
    assert manifest == read_manifest(run.root / "checkpoints" / "000000000012")
    assert (manifest.step, manifest.epoch, manifest.final, manifest.signature) == (12, 3, True, signature)
    assert (manifest.metrics, manifest.versions) == ({"loss": 0.5}, {"keras": "3"})
    assert manifest.digest == manifest.files[0].sha256


def test_versions_are_those_installed_unless_given(run: RunDir) -> None:
    manifest = _publish(CheckpointPublisher(run, keep=1), 1)
    assert {"python", "understudy", "keras", "tensorflow"} <= manifest.versions.keys()


def test_every_file_is_listed(publish: Publish) -> None:
    assert [entry.path for entry in publish(1).files] == ["model.keras", "resume/state"]


def test_a_committed_step_is_not_published_again(run: RunDir, publish: Publish) -> None:
    publish(5)
    with pytest.raises(AlreadyPublishedError, match="step 5 is committed already"):
        publish(5)
    assert _names(run) == {"000000000005"}


def test_what_was_never_committed_makes_way(run: RunDir, publish: Publish) -> None:
    run.checkpoint(5).mkdir(parents=True)
    (run.checkpoint(5) / "model.keras").write_bytes(b"half")
    publish(5)
    assert len(polled(RunSource(run))) == 1


def test_a_full_disk_keeps_the_old_checkpoints_and_leaves_no_part_of_the_new(run: RunDir, publish: Publish) -> None:
    def write(folder: Path) -> None:
        (folder / "model.keras").write_bytes(b"as much as fitted")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    publish(1)
    publisher = CheckpointPublisher(run, keep=1)
    with pytest.raises(OSError, match="No space left"):
        publisher.publish(2, write, epoch=0, final=False, metrics={}, signature=None)
    assert _names(run) == {"000000000001"}
    _publish(publisher, 2)
    assert _names(run) == {"000000000002"}


def test_a_write_without_a_model_is_refused(run: RunDir) -> None:
    publisher = CheckpointPublisher(run, keep=1)
    with pytest.raises(ValueError, match=r"model\.keras; it left other"):
        publisher.publish(
            1,
            lambda folder: (folder / "other").touch(),
            epoch=0,
            final=False,
            metrics={},
            signature=None,
        )
    assert _names(run) == set()


def test_the_newest_are_kept(run: RunDir) -> None:
    publisher = CheckpointPublisher(run, keep=2)
    for step in (1, 2, 3, 4):
        _publish(publisher, step)
    assert run.committed_steps() == [3, 4]
    assert _names(run) == {"000000000003", "000000000004"}


def test_a_pinned_step_is_never_pruned(run: RunDir) -> None:
    publisher = CheckpointPublisher(run, keep=1)
    _publish(publisher, 1)
    (run.leases / "000000000001").mkdir(parents=True)
    _publish(publisher, 2)
    _publish(publisher, 3)
    assert run.committed_steps() == [1, 3]
    (run.leases / "000000000001").rmdir()
    _publish(publisher, 4)
    assert run.committed_steps() == [4]


def test_only_the_newest_are_looked_into_while_the_others_are_leased(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = CheckpointPublisher(run, keep=2)
    for step in range(1, 9):
        (run.leases / f"{step:012d}").mkdir(parents=True)
        _publish(publisher, step)
    looked: list[int] = []
    is_committed = RunDir.is_committed

    def noted(of: RunDir, step: int) -> bool:
        looked.append(step)
        return is_committed(of, step)

    monkeypatch.setattr(RunDir, "is_committed", noted)
    _publish(publisher, 9)
    assert looked == [9, 8]


def test_keeping_none_is_refused(run: RunDir) -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        CheckpointPublisher(run, keep=0)


@pytest.mark.parametrize("where", ["writing", "renaming"])
def test_a_killed_publisher_commits_nothing_and_the_next_one_sweeps(run: RunDir, publish: Publish, where: str) -> None:
    publish(1)
    command = [sys.executable, "-c", _PUBLISHER, str(run.root), where]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "stopped\n"

        CheckpointPublisher(run, keep=3)
        assert len(_names(run)) == 2, "a living publisher's work is no leftover"
        with pytest.raises(LockHeldError, match=f"process {victim.pid}"):
            publish(2)
        victim.kill()

    assert [checkpoint.step for checkpoint in polled(RunSource(run))] == [1]
    publisher = CheckpointPublisher(run, keep=3)
    assert _names(run) == {"000000000001"}
    _publish(publisher, 2)
    assert run.committed_steps() == [1, 2]


def test_two_publishers_do_not_publish_at_once(run: RunDir) -> None:
    publisher = CheckpointPublisher(run, keep=1)
    with DirectoryLock(run.checkpoints), pytest.raises(LockHeldError):
        _publish(publisher, 1)
