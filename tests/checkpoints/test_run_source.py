"""Discovering and taking published checkpoints, whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testkit.polling import polled
from testkit.small_disk import fill, mounted
from understudy.checkpoints import (
    CheckpointGoneError,
    CheckpointPublisher,
    DamagedCheckpointError,
    LocationGoneError,
    RunDir,
    RunSource,
    UnsupportedFormatError,
    open_local_checkpoint,
    run_source,
)
from understudy.checkpoints import manifest as manifest_module
from understudy.checkpoints.fs import link_or_copy, read_within, remove_folder
from understudy.checkpoints.layout import MANIFEST_FILE
from understudy.checkpoints.manifest import describe_file, encode_manifest, read_manifest, verify_files
from understudy.checkpoints.run_listing import FolderChanges, RunListing
from understudy.checkpoints.source import PublishedCheckpoint

from .conftest import Publish


def test_a_run_folder_that_does_not_exist_yet_is_empty(run: RunDir) -> None:
    assert polled(RunSource(run)) == []


def test_checkpoints_come_in_step_order(run: RunDir, publish: Publish) -> None:
    for step in (10, 9, 200):
        publish(step, final=step == 200)
    found = polled(RunSource(run))
    assert [(checkpoint.step, checkpoint.final) for checkpoint in found] == [(9, False), (10, False), (200, True)]


def test_the_newest_comes_first_and_each_poll_reads_as_many(
    run: RunDir, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_source, "_READ_AT_FIRST", 1)
    monkeypatch.setattr(run_source, "_READ_AT_ONCE", 2)
    steps = list(range(1, 101))
    for step in steps:
        publish(step)
    source = RunSource(run)
    assert [checkpoint.step for checkpoint in polled(source)] == [100]
    sizes = []
    while not source.is_complete:
        sizes.append(len(source.poll()))
        found = [checkpoint.step for checkpoint in source.found]
        assert found == steps[-len(found) :]
    assert found == steps
    assert sizes == [*[2] * 49, 1]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("accepts", ["links", "copies"])
def test_a_file_of_holes_is_refused_though_its_manifest_lists_its_size(
    run: RunDir, publish: Publish, accepts: str
) -> None:
    manifest = publish(1)
    model = run.checkpoint(1) / "model.keras"
    with model.open("r+b") as sparse:
        sparse.truncate(2**41)
    files = tuple(replace(entry, size_bytes=2**41) if entry.path == model.name else entry for entry in manifest.files)
    (run.checkpoint(1) / MANIFEST_FILE).write_bytes(encode_manifest(replace(manifest, files=files)))
    (checkpoint,) = polled(RunSource(run))
    with pytest.raises(DamagedCheckpointError, match="has 2199023255552 bytes, of which nearly all are holes"):
        checkpoint.fetch(run.leases / "000000000001")
    with pytest.raises(DamagedCheckpointError, match="nearly all are holes"):
        link_or_copy(model, run.root / "copy", root=run.root, link=accepts == "links")
    assert not (run.root / "copy").exists()


def test_a_file_that_would_fill_the_disk_is_not_copied(
    run: RunDir, publish: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(1)
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk._replace(total=2**40, free=2**28))
    with pytest.raises(OSError, match="would leave too little of the"):
        link_or_copy(run.checkpoint(1) / "model.keras", tmp_path / "copy", root=run.root, link=False)
    assert not (tmp_path / "copy").exists()


def test_a_file_of_which_a_part_are_holes_is_accepted(run: RunDir, publish: Publish) -> None:
    publish(1)
    model = run.checkpoint(1) / "model.keras"
    with model.open("r+b") as file:
        file.truncate(2**30)
        for part in range(80):
            file.seek(part * 2**23)
            file.write(b"x" * 2**20)
    link_or_copy(model, run.root / "copy", root=run.root)
    assert (run.root / "copy").stat().st_size == 2**30


def test_a_digest_of_another_model_is_refused(run: RunDir, publish: Publish) -> None:
    scored, other = publish(1), publish(2)
    folder = run.checkpoint(2)
    (folder / "model.keras").write_bytes(b"other weights")
    files = tuple(describe_file(folder, entry.path) for entry in other.files)
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(replace(other, files=files, digest=scored.digest)))
    checkpoint = RunSource(run).poll()[2]
    assert checkpoint is not None
    with pytest.raises(DamagedCheckpointError, match=f"has the digest {scored.digest}, and its files have"):
        checkpoint.fetch(run.root / "mine")


def test_a_peek_tells_that_something_was_committed(run: RunDir, publish: Publish) -> None:
    source = RunSource(run)
    nothing = source.peek()
    publish(1)
    os.utime(run.checkpoints, ns=(1, 1))  # long ago, as clocks of file systems are coarse
    one = source.peek()
    assert one == source.peek() != nothing
    publish(2)
    assert source.peek() != one


def test_new_and_deleted_checkpoints_are_noticed(run: RunDir, publish: Publish) -> None:
    source = RunSource(run)
    publish(1)
    first = polled(source)
    publish(2)
    assert polled(source) == [*first, *polled(source)[1:]]
    remove_folder(run.checkpoint(1))
    assert [checkpoint.step for checkpoint in polled(source)] == [2]


def test_a_folder_that_is_gone_as_a_whole_is_no_news_of_its_checkpoints(run: RunDir, publish: Publish) -> None:
    """A mount that is lost and returns would else be taken for the end of every checkpoint."""
    source = RunSource(run)
    publish(1)
    (first,) = polled(source)
    away = run.root.rename(run.root.with_name("away"))
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="checkpoints is gone; waiting for it to return"):
            source.poll()
    assert [*source.found] == [first]
    away.rename(run.root)
    assert not source.poll()
    publish(2)
    assert [checkpoint.step for checkpoint in polled(source)] == [1, 2]


def test_a_folder_without_a_manifest_is_not_there(run: RunDir, publish: Publish) -> None:
    publish(1)
    (run.checkpoint(1) / "manifest.json").unlink()
    assert polled(RunSource(run)) == []


def test_a_taken_checkpoint_is_whole_and_outlives_the_original(run: RunDir, publish: Publish) -> None:
    manifest = publish(1)
    (checkpoint,) = polled(RunSource(run))
    local = checkpoint.fetch(run.leases / "000000000001")
    remove_folder(run.checkpoint(1))
    assert local.model_file.read_bytes() == b"the model " * 20
    assert (local.manifest, local.digest) == (manifest, checkpoint.digest)
    assert open_local_checkpoint(local.directory) == local


def test_taking_again_gives_the_same_folder(run: RunDir, publish: Publish) -> None:
    publish(1)
    (checkpoint,) = polled(RunSource(run))
    first = checkpoint.fetch(run.leases / "000000000001")
    inode = first.model_file.stat().st_ino
    remove_folder(run.checkpoint(1))
    assert checkpoint.fetch(run.leases / "000000000001") == first
    assert first.model_file.stat().st_ino == inode


def test_a_private_folder_that_is_damaged_or_of_another_model_is_made_again(run: RunDir, publish: Publish) -> None:
    publish(1)
    (checkpoint,) = polled(RunSource(run))
    into = run.leases / "000000000001"
    into.mkdir(parents=True)
    (into / "model.keras").write_bytes(b"half")
    checkpoint.fetch(into)
    (into / "model.keras").unlink()
    checkpoint.fetch(into)
    verify_files(into, read_manifest(into))
    assert [path.name for path in run.leases.iterdir()] == [into.name]


def test_a_released_checkpoint_is_deleted_and_the_original_stays(run: RunDir, publish: Publish) -> None:
    publish(1)
    (checkpoint,) = polled(RunSource(run))
    local = checkpoint.fetch(run.leases / "000000000001")
    local.release()
    local.release()
    assert list(run.leases.iterdir()) == []
    assert (run.checkpoint(1) / "model.keras").exists()


def test_a_checkpoint_deleted_before_it_is_taken_is_gone(run: RunDir, publish: Publish) -> None:
    publish(1)
    (checkpoint,) = polled(RunSource(run))
    remove_folder(run.checkpoint(1))
    with pytest.raises(CheckpointGoneError, match="deleted before it could be fetched"):
        checkpoint.fetch(run.leases / "000000000001")
    assert list(run.leases.iterdir()) == []


def test_a_checkpoint_that_is_gone_with_all_others_is_not_taken_for_a_deleted_one(
    run: RunDir, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(1)
    source = RunSource(run)
    (checkpoint,) = polled(source)
    run.checkpoints.rename(away := run.root / "away")
    with pytest.raises(LocationGoneError, match="checkpoints is gone; waiting for it to return"):
        checkpoint.fetch(run.root.parent / "leases" / "1")
    away.rename(run.checkpoints)
    publish(2)
    listed = RunListing.changes

    def gone_once_it_is_listed(listing: RunListing) -> FolderChanges:
        changes = listed(listing)
        run.checkpoints.rename(away)
        return changes

    with monkeypatch.context() as patched:
        patched.setattr(RunListing, "changes", gone_once_it_is_listed)
        with pytest.raises(LocationGoneError):
            source.poll()
    away.rename(run.checkpoints)
    assert [type(each) for each in polled(source)] == [PublishedCheckpoint] * 2


def test_a_checkpoint_deleted_while_it_is_taken_is_whole_or_gone(run: RunDir, publish: Publish) -> None:
    outcomes = []
    for step in range(60):
        publish(step)
        (checkpoint,) = polled(RunSource(run))
        barrier = threading.Barrier(2, timeout=100)

        def delete(step: int = step, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            remove_folder(run.checkpoint(step))

        deleter = threading.Thread(target=delete)
        deleter.start()
        barrier.wait()
        try:
            local = checkpoint.fetch(run.leases / str(step))
            verify_files(local.directory, local.manifest)
            outcomes.append("whole")
        except CheckpointGoneError:
            assert not (run.leases / str(step)).exists()
            outcomes.append("gone")
        deleter.join()
    assert len(outcomes) == 60


def test_a_truncated_checkpoint_is_damaged(run: RunDir, publish: Publish) -> None:
    publish(1)
    with (run.checkpoint(1) / "model.keras").open("r+b") as file:
        file.truncate(100)
    (checkpoint,) = polled(RunSource(run))
    with pytest.raises(DamagedCheckpointError, match=r"model\.keras has 100 bytes, its manifest says 200"):
        checkpoint.fetch(run.leases / "000000000001")
    assert list(run.leases.iterdir()) == []


@pytest.mark.parametrize("part", ["model.keras", "resume/state"])
def test_a_checkpoint_with_a_part_missing_is_damaged(run: RunDir, publish: Publish, part: str) -> None:
    publish(1)
    (run.checkpoint(1) / part).unlink()
    (checkpoint,) = polled(RunSource(run))
    with pytest.raises(DamagedCheckpointError, match=f"{part} is missing, its manifest lists it"):
        checkpoint.fetch(run.leases / "000000000001")
    assert list(run.leases.iterdir()) == []


@given(st.data())
@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # One checkpoint serves all examples.
)
def test_a_flipped_bit_in_any_file_is_damage(run: RunDir, publish: Publish, data: st.DataObject) -> None:
    if not run.committed_steps():
        publish(1)
    part = data.draw(st.sampled_from(["model.keras", "resume/state", "manifest.json"]))
    path = run.checkpoint(1) / part
    whole = path.read_bytes()
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(flipped)
    try:
        (checkpoint,) = polled(RunSource(run))
        with pytest.raises((DamagedCheckpointError, UnsupportedFormatError)):
            checkpoint.fetch(run.leases / "000000000001")
        assert not (run.leases / "000000000001").exists()
    finally:
        path.write_bytes(whole)


def test_a_damaged_manifest_is_reported_not_skipped(run: RunDir, publish: Publish) -> None:
    publish(1)
    publish(2)
    (run.checkpoint(1) / "manifest.json").write_text("{")
    damaged, good = polled(RunSource(run))
    assert (damaged.step, damaged.manifest, good.step) == (1, None, 2)
    with pytest.raises(DamagedCheckpointError, match="not a manifest"):
        damaged.fetch(run.leases / "000000000001")


def test_a_checkpoint_in_another_steps_folder_is_damaged(run: RunDir, publish: Publish) -> None:
    publish(1)
    run.checkpoint(1).rename(run.checkpoint(2))
    (checkpoint,) = polled(RunSource(run))
    with pytest.raises(DamagedCheckpointError, match="is the manifest of step 1"):
        checkpoint.fetch(run.leases / "000000000002")


def test_a_repaired_checkpoint_can_be_fetched(run: RunDir, publish: Publish) -> None:
    publish(1)
    manifest = run.checkpoint(1) / "manifest.json"
    content = manifest.read_bytes()
    manifest.write_bytes(b"{")
    source = RunSource(run)
    (damaged,) = polled(source)
    manifest.write_bytes(content)
    (repaired,) = polled(source)
    assert repaired.digest != damaged.digest
    assert repaired.fetch(run.leases / "000000000001").step == 1


def test_files_are_copied_where_they_cannot_be_linked(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")  # noqa: S108 - another file system is the point
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    source = elsewhere / f"understudy-test-{os.getpid()}"
    try:
        source.write_bytes(b"content")
        link_or_copy(source, tmp_path / "new" / "copy", root=elsewhere)
    finally:
        source.unlink()
    assert (tmp_path / "new" / "copy").read_bytes() == b"content"


def test_a_folder_half_deleted_by_hand_is_gone_once_its_manifest_is(run: RunDir, publish: Publish) -> None:
    publish(1)
    (checkpoint,) = polled(RunSource(run))
    shutil.rmtree(run.checkpoint(1) / "resume")
    (run.checkpoint(1) / "manifest.json").unlink()
    with pytest.raises(CheckpointGoneError):
        checkpoint.fetch(run.leases / "000000000001")


def test_a_folder_above_the_highest_step_is_refused_by_name_once_and_the_others_are_found(
    run: RunDir, publish: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    publish(5)
    shutil.copytree(run.checkpoint(5), run.checkpoints / str(2**63))
    shutil.copytree(run.checkpoint(5), run.checkpoints / str(2**63 - 1))  # a step, whose manifest is another's
    source = RunSource(run)
    for _ in range(2):
        assert [checkpoint.step for checkpoint in polled(source)] == [5, 2**63 - 1]
        publish(6)
        remove_folder(run.checkpoint(6))
    assert run.committed_steps() == [5, 2**63 - 1]
    (told,) = [record.message for record in caplog.records]
    assert told == f"{run.checkpoints / str(2**63)} is ignored: its number is above the highest step, {2**63 - 1}"


def test_nothing_is_published_above_the_highest_step(publish: Publish) -> None:
    with pytest.raises(ValueError, match=f"from 0 to {2**63 - 1}, not {2**63}"):
        publish(2**63)


def test_a_manifest_that_this_machine_cannot_read_now_delays_no_other(
    run: RunDir, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:

    def read(path: Path, root: Path, *, limit: int) -> bytes:
        if root == run.checkpoint(2):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read_within(path, root, limit=limit)

    for step in (1, 2, 3):
        publish(step)
    source = RunSource(run)
    with monkeypatch.context() as patch:
        patch.setattr(manifest_module, "read_within", read)
        for _ in range(3):
            assert [checkpoint.step for checkpoint in polled(source)] == [1, 3]
            assert source.is_complete
            assert f"{run.checkpoint(2)} cannot be read: [Errno 5]" in source.unread
    assert [checkpoint.step for checkpoint in polled(source)] == [1, 2, 3]
    assert not source.unread


def test_a_folder_that_has_not_changed_is_not_listed_for_one_that_is_not_committed(
    run: RunDir, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(1)
    run.checkpoint(2).mkdir()
    (run.checkpoint(3)).mkdir()
    (run.checkpoint(3) / "manifest.json").write_bytes(b"{")
    os.utime(run.checkpoints, ns=(1, 1))
    source = RunSource(run)
    found = polled(source)
    assert [checkpoint.step for checkpoint in found] == [1, 3]
    monkeypatch.setattr(RunListing, "changes", None)
    assert source.poll() == {}
    assert source.found == found
    shutil.copy(run.checkpoint(1) / "manifest.json", run.checkpoint(2))
    assert [checkpoint.step for checkpoint in polled(source)] == [1, 2, 3]


@pytest.mark.parametrize("name", ["manifest.json", "model.keras"])
def test_a_link_out_of_the_run_is_refused(run: RunDir, publish: Publish, tmp_path: Path, name: str) -> None:
    publish(1)
    publish(2)
    (run.checkpoint(2) / name).rename(tmp_path / "elsewhere")
    (run.checkpoint(2) / name).symlink_to(tmp_path / "elsewhere")
    good, linked = polled(RunSource(run))
    assert good.fetch(run.leases / "000000000001").step == 1
    with pytest.raises(DamagedCheckpointError, match=r"symbolic link out of .* put the file itself there"):
        linked.fetch(run.leases / "000000000002")
    assert not (run.leases / "000000000002").exists()


def test_a_link_within_the_run_is_copied(run: RunDir, publish: Publish) -> None:
    publish(1)
    publish(2)
    (run.checkpoint(2) / "model.keras").unlink()
    (run.checkpoint(2) / "model.keras").symlink_to(run.checkpoint(1) / "model.keras")
    _, linked = polled(RunSource(run))
    local = linked.fetch(run.leases / "000000000002")
    assert not local.model_file.is_symlink()
    assert local.model_file.read_bytes() == (run.checkpoint(1) / "model.keras").read_bytes()


def test_a_folder_in_the_place_of_a_file_is_refused_and_keeps_no_file_open(run: RunDir, publish: Publish) -> None:
    publish(1)
    (run.checkpoint(1) / MANIFEST_FILE).unlink()
    (run.checkpoint(1) / MANIFEST_FILE).mkdir()
    source = RunSource(run)
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    for _ in range(5):
        with pytest.raises(DamagedCheckpointError, match="is no regular file"):
            read_within(run.checkpoint(1) / MANIFEST_FILE, run.root, limit=1)
    (checkpoint,) = polled(source)
    with pytest.raises(DamagedCheckpointError, match="is no regular file"):
        checkpoint.fetch(run.leases / "000000000001")
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before


@pytest.mark.parametrize("name", ["manifest.json", "model.keras"])
@pytest.mark.timeout(30)
def test_a_pipe_is_refused_without_waiting_for_its_writer(run: RunDir, publish: Publish, name: str) -> None:
    publish(1)
    (run.checkpoint(1) / name).unlink()
    os.mkfifo(run.checkpoint(1) / name)
    (piped,) = polled(RunSource(run))
    with pytest.raises(DamagedCheckpointError, match="no regular file"):
        piped.fetch(run.leases / "000000000001")


def test_a_manifest_without_end_is_refused(run: RunDir, publish: Publish) -> None:
    publish(1)
    with (run.checkpoint(1) / "manifest.json").open("ab") as file:
        file.truncate(2**40)
    (endless,) = polled(RunSource(run))
    with pytest.raises(DamagedCheckpointError, match="more than 16777216 bytes"):
        endless.fetch(run.leases / "000000000001")


def test_a_file_in_the_place_of_a_checkpoint_s_folder_delays_no_other(run: RunDir, publish: Publish) -> None:
    publish(1)
    run.checkpoint(2).touch()
    assert [checkpoint.step for checkpoint in polled(RunSource(run))] == [1]


def test_a_publication_reads_the_status_of_few_folders(
    run: RunDir, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(0)
    for step in range(1, 300):
        run.checkpoint(step).mkdir()
    source = RunSource(run)
    source.poll()
    read: list[str] = []
    read_folder = RunListing._read

    def noted(listing: RunListing, entry: os.DirEntry[str]) -> Any:
        read.append(entry.name)
        return read_folder(listing, entry)

    monkeypatch.setattr(RunListing, "_read", noted)
    publish(300)
    assert [checkpoint.step for checkpoint in polled(source)] == [0, 300]
    assert sorted(set(read) - {"lock"}) == [run.checkpoint(step).name for step in range(236, 301)]


def test_a_listing_sees_every_replaced_folder_when_it_is_complete(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(70):
        run.checkpoint(step).mkdir(parents=True)
    listing = RunListing(run)
    before = listing.changes().present
    assert sorted(before) == [*range(70)]
    os.utime(run.checkpoint(0), ns=(1, 1))  # as a replacement with the same inode
    os.utime(run.checkpoint(69), ns=(1, 1))
    assert listing.changes() == ({69: (before[69][0], 1)}, [])
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
    run.checkpoint(5).rmdir()
    assert listing.changes() == ({0: (before[0][0], 1)}, [5])


def _publish(run: RunDir, step: int, content: bytes) -> None:
    def write(folder: Path) -> None:
        (folder / "model.keras").write_bytes(content)

    CheckpointPublisher(run, keep=100).publish(step, write, epoch=None, final=False, metrics={}, signature=None)


@given(
    changes=st.lists(
        st.tuples(st.sampled_from(["publish", "delete", "spoil"]), st.integers(0, 5)), min_size=1, max_size=12
    )
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_source_that_polls_after_each_change_finds_what_a_new_one_finds(
    changes: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = RunDir(tmp_path_factory.mktemp("law"))
    source = RunSource(run)
    for number, (change, step) in enumerate(changes):
        folder = run.checkpoint(step)
        if change == "publish":
            remove_folder(folder)
            _publish(run, step, content=f"{number}".encode())
        elif change == "delete":
            remove_folder(folder)
        elif folder.exists():
            (folder / "manifest.json").write_bytes(b"{%d" % number)
            os.utime(folder, ns=(number, number))
        found = {checkpoint.step: checkpoint.digest for checkpoint in polled(source)}
        assert found == {checkpoint.step: checkpoint.digest for checkpoint in polled(RunSource(run))}


def test_a_copy_for_which_there_is_no_room_fails_instead_of_being_shorter(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(200_000))
    with mounted(tmp_path / "disk") as disk:
        fill(disk, leave=100_000)
        with pytest.raises(OSError, match="No space left on device"):
            link_or_copy(source, disk / "copy", root=tmp_path)
