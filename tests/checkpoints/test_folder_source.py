"""Reading what a plain Keras script writes, while it writes it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import IO, BinaryIO

import pytest

from testkit.polling import poll_all, polled, steps_of
from understudy.checkpoints import (
    Checkpoint,
    CheckpointGoneError,
    DamagedCheckpointError,
    FolderSource,
    LocationGoneError,
    UnsupportedFormatError,
    open_local_checkpoint,
    stable_copy,
)
from understudy.checkpoints.fs import open_within

from .conftest import Clock, WriteKeras, set_modified, staged


def test_a_folder_that_is_gone_as_a_whole_is_no_news_of_its_checkpoints(
    source: FolderSource, folder: Path, write_keras: WriteKeras
) -> None:
    write_keras(folder / "model-1.keras")
    (found,) = polled(source)
    away = folder.rename(folder.with_name("away"))
    with pytest.raises(FileNotFoundError, match="theirs is gone; waiting for it to return"):
        source.poll()
    assert [*source.found] == [found]
    away.rename(folder)
    assert not source.poll()


def test_a_folder_that_does_not_exist_yet_is_empty(tmp_path: Path) -> None:
    assert polled(FolderSource(tmp_path / "later", tmp_path / "staging")) == []


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        FolderSource(tmp_path / "file", tmp_path / "staging").poll()


def test_checkpoints_come_in_step_order(folder: Path, source: FolderSource, write_keras: WriteKeras) -> None:
    write_keras(folder / "best.keras", weight=1, iterations=300)
    write_keras(folder / "last.keras", weight=2, iterations=100)
    write_keras(folder / "epoch-07.keras", weight=3)
    assert steps_of(source) == [7, 100, 300]


def test_a_name_that_is_no_text_hides_no_other_checkpoint(
    folder: Path, source: FolderSource, write_keras: WriteKeras
) -> None:
    write_keras(folder / os.fsdecode(b"caf\xe9-20.keras"), weight=1)
    write_keras(folder / "cafe-30.keras", weight=2)
    assert steps_of(source) == [20, 30]


def test_a_sparse_file_without_end_is_not_copied_and_delays_no_other(
    folder: Path, source: FolderSource, write_keras: WriteKeras, tmp_path: Path
) -> None:
    with (folder / "sparse-20.keras").open("wb") as sparse:
        sparse.truncate(shutil.disk_usage(tmp_path).free)
    write_keras(folder / "model-30.keras", weight=2)
    assert steps_of(source) == [30]
    assert sum(path.stat().st_size for path in tmp_path.rglob("staging/*/*")) < 2**20


def test_a_counter_follows_the_order_of_writing(folder: Path, source: FolderSource, write_keras: WriteKeras) -> None:
    set_modified(write_keras(folder / "early.keras", weight=1), 2000)
    set_modified(write_keras(folder / "but_earlier.keras", weight=2), 1000)
    assert [checkpoint.created_at for checkpoint in polled(source)] == [1000.0, 2000.0]


def test_a_taken_checkpoint_is_private_and_describes_itself(
    folder: Path,
    tmp_path: Path,
    source: FolderSource,
    write_keras: WriteKeras,
) -> None:
    origin = write_keras(folder / "model.keras", iterations=5)
    content = origin.read_bytes()
    (checkpoint,) = polled(source)
    local = checkpoint.fetch(tmp_path / "pinned" / "5")
    origin.unlink()
    assert local.model_file.read_bytes() == content
    assert (local.step, local.digest, checkpoint.manifest) == (5, checkpoint.digest, None)
    assert open_local_checkpoint(local.directory) == local
    assert checkpoint.fetch(tmp_path / "pinned" / "5") == local
    assert staged(tmp_path) == []


def test_the_writers_file_is_copied_not_linked(
    folder: Path,
    tmp_path: Path,
    source: FolderSource,
    write_keras: WriteKeras,
) -> None:
    origin = write_keras(folder / "model.keras", iterations=5)
    (checkpoint,) = polled(source)
    local = checkpoint.fetch(tmp_path / "pinned" / "5")
    assert not local.model_file.samefile(origin)
    assert origin.stat().st_nlink == 1


def test_an_overwritten_path_gives_successive_versions(
    folder: Path,
    source: FolderSource,
    write_keras: WriteKeras,
) -> None:
    found: list[Checkpoint] = []
    for weight in (1, 2, 3):
        write_keras(folder / "model_v2.keras", weight=weight)
        found += polled(source)
    assert [checkpoint.step for checkpoint in found] == [2, 3, 4]
    assert len({checkpoint.digest for checkpoint in found}) == 3


def test_a_version_can_be_fetched_until_its_successor_is_found(
    folder: Path,
    tmp_path: Path,
    source: FolderSource,
    write_keras: WriteKeras,
) -> None:
    path = write_keras(folder / "model.keras", weight=1, iterations=10)
    (old,) = polled(source)
    write_keras(path, weight=2, iterations=20)
    assert old.fetch(tmp_path / "pinned" / "10").step == 10
    assert steps_of(source) == [20]
    with pytest.raises(CheckpointGoneError, match="overwritten or deleted before step 10"):
        old.fetch(tmp_path / "pinned" / "again")
    assert not (tmp_path / "pinned" / "again").exists()


def test_a_checkpoint_can_be_fetched_twice_while_its_file_is_there(
    folder: Path,
    tmp_path: Path,
    source: FolderSource,
    write_keras: WriteKeras,
) -> None:
    write_keras(folder / "model.keras", iterations=10)
    (checkpoint,) = polled(source)
    one = checkpoint.fetch(tmp_path / "pinned" / "one")
    two = checkpoint.fetch(tmp_path / "pinned" / "two")
    assert one.manifest == two.manifest


def test_a_deleted_file_is_gone(folder: Path, tmp_path: Path, source: FolderSource, write_keras: WriteKeras) -> None:
    path = write_keras(folder / "model.keras", iterations=10)
    (checkpoint,) = polled(source)
    path.unlink()
    (folder / "notes.txt").touch()
    assert polled(source) == []
    assert staged(tmp_path) == []
    with pytest.raises(CheckpointGoneError):
        checkpoint.fetch(tmp_path / "pinned" / "10")


def test_a_file_that_is_gone_with_its_folder_is_not_taken_for_a_deleted_one(
    folder: Path, tmp_path: Path, source: FolderSource, write_keras: WriteKeras
) -> None:
    write_keras(folder / "model.keras", iterations=10)
    (checkpoint,) = polled(source)
    checkpoint.fetch(tmp_path / "pinned" / "one")
    folder.rename(tmp_path / "away")
    with pytest.raises(LocationGoneError, match="is gone; waiting for it to return"):
        checkpoint.fetch(tmp_path / "pinned" / "two")
    folder.mkdir()
    for look in (lambda: checkpoint.fetch(tmp_path / "pinned" / "two"), source.poll):
        with pytest.raises(LocationGoneError, match="is empty; waiting for its checkpoints to return"):
            look()
    folder.rmdir()
    (tmp_path / "away").rename(folder)
    assert not source.poll()
    assert checkpoint.fetch(tmp_path / "pinned" / "two").step == 10


def test_the_same_model_in_two_files_is_one_checkpoint(
    folder: Path,
    source: FolderSource,
    write_keras: WriteKeras,
) -> None:
    write_keras(folder / "best.keras", iterations=10, date="Monday")
    write_keras(folder / "epoch-01.keras", iterations=10, date="Tuesday")
    assert steps_of(source) == [10]


def test_steps_are_the_same_after_a_restart(folder: Path, tmp_path: Path, write_keras: WriteKeras) -> None:
    path = write_keras(folder / "model.keras", weight=1)
    source = FolderSource(folder, tmp_path / "staging")
    assert steps_of(source) == [1]
    write_keras(path, weight=2)
    assert steps_of(source) == [2]
    restarted = FolderSource(folder, tmp_path / "staging")
    assert steps_of(restarted) == [2]


def test_a_training_that_was_run_again_meanwhile_goes_on_after_the_steps_of_the_first(
    folder: Path, tmp_path: Path, write_keras: WriteKeras
) -> None:
    paths = [folder / f"{epoch}.keras" for epoch in range(1, 7)]
    for run in (0, 1):
        for epoch, path in enumerate(paths, 1):
            write_keras(path, weight=10 * run + epoch, iterations=10 * epoch)
            set_modified(path, 1000 * run + epoch)
        found = poll_all(FolderSource(folder, tmp_path / "staging"))
        assert [checkpoint.step for checkpoint in found] == [60 * run + 10 * epoch for epoch in range(1, 7)]
        assert [checkpoint.created_at for checkpoint in found] == [1000 * run + epoch for epoch in range(1, 7)]


def test_copies_of_an_earlier_process_are_deleted_at_the_first_poll_and_not_before(
    folder: Path, tmp_path: Path, source: FolderSource, write_keras: WriteKeras
) -> None:
    path = write_keras(folder / "model.keras", iterations=10)
    (first,) = polled(source)
    path.unlink()
    other = FolderSource(folder, tmp_path / "staging")  # by a process that is then refused the state folder
    assert first.fetch(tmp_path / "pinned" / "10").step == 10

    write_keras(path, iterations=10)
    source.poll()
    path.unlink()
    other.poll()
    assert staged(tmp_path) == []


def test_only_a_few_copies_are_kept_and_the_others_made_again(
    folder: Path,
    tmp_path: Path,
    source: FolderSource,
    write_keras: WriteKeras,
) -> None:
    for step in range(1, 11):
        set_modified(write_keras(folder / f"{step}.keras", weight=step, iterations=step), step)
    found = poll_all(source)
    assert len(staged(tmp_path)) == 4
    assert [checkpoint.fetch(tmp_path / "pinned" / str(checkpoint.step)).step for checkpoint in found] == [
        *range(1, 11)
    ]


def test_an_unchanged_file_is_read_once(
    folder: Path,
    source: FolderSource,
    write_keras: WriteKeras,
) -> None:
    write_keras(folder / "model.keras", iterations=10)
    (first,) = polled(source)
    (second,) = polled(source)
    assert second is first


def test_a_file_that_is_being_written_appears_once_it_is_whole(
    folder: Path,
    tmp_path: Path,
    source: FolderSource,
    clock: Clock,
    write_keras: WriteKeras,
) -> None:
    path = write_keras(folder / "model.keras", iterations=10)
    content = path.read_bytes()
    for length in (0, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        clock.now += 4
        assert polled(source) == []
    assert staged(tmp_path) == []
    path.write_bytes(content)
    assert steps_of(source) == [10]


def test_a_file_that_stays_torn_is_reported_as_damaged(
    folder: Path,
    tmp_path: Path,
    source: FolderSource,
    clock: Clock,
    write_keras: WriteKeras,
) -> None:
    path = write_keras(folder / "epoch-3.keras", iterations=10)
    content = path.read_bytes()
    path.write_bytes(content[:100])
    assert polled(source) == []
    clock.now += 6
    (damaged,) = polled(source)
    assert damaged.step == 3
    with pytest.raises(DamagedCheckpointError, match=r"epoch-3\.keras.* is not a whole \.keras file"):
        damaged.fetch(tmp_path / "pinned" / "3")
    assert list(polled(source)) == [damaged]
    path.write_bytes(content)
    assert steps_of(source) == [10]


def test_a_full_disk_under_the_copies_leaves_none_and_heals(
    *,
    folder: Path,
    tmp_path: Path,
    source: FolderSource,
    clock: Clock,
    write_keras: WriteKeras,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_reader: IO[bytes], writer: IO[bytes], _length: int) -> None:
        writer.write(b"as much as fitted")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_keras(folder / "model.keras", iterations=10)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", fail)
        assert steps_of(source) == []
    assert staged(tmp_path) == []
    assert steps_of(source) == []  # Not at once: a copy that fails late is dear.
    assert source.unread == f"{folder / 'model.keras'} cannot be read: [Errno 28] No space left on device"
    clock.now += 1
    assert steps_of(source) == [10]
    assert not source.unread


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM])
def test_a_file_that_this_machine_cannot_read_now_delays_no_other(
    *,
    folder: Path,
    source: FolderSource,
    clock: Clock,
    write_keras: WriteKeras,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    def open_unless_bad(path: Path, root: Path) -> BinaryIO:
        if path.name == "bad.keras":
            raise OSError(number, os.strerror(number), str(path))
        return open_within(path, root)

    write_keras(folder / "bad.keras", iterations=20, weight=2.0)
    write_keras(folder / "good.keras", iterations=10)
    with monkeypatch.context() as patch:
        patch.setattr(stable_copy, "open_within", open_unless_bad)
        for _ in range(4):
            assert steps_of(source) == [10]
            assert f"bad.keras cannot be read: [Errno {number}]" in source.unread
            clock.now += 60
    assert steps_of(source) == [10, 20]
    assert not source.unread


def test_of_several_files_that_cannot_be_read_now_the_newest_is_named(
    folder: Path, source: FolderSource, write_keras: WriteKeras, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, _root: Path) -> BinaryIO:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path.name)

    for number in (1, 2, 3):
        os.utime(write_keras(folder / f"{number}.keras", iterations=number, weight=float(number)), (number, number))
    monkeypatch.setattr(stable_copy, "open_within", refuse)
    assert steps_of(source) == []
    newest = folder / "3.keras"
    assert source.unread == f"{newest} cannot be read, nor can 2 more: [Errno 13] Permission denied: '3.keras'"


def test_other_files_are_not_looked_at(folder: Path, source: FolderSource, write_keras: WriteKeras) -> None:
    write_keras(folder / "model.keras", iterations=10)
    (folder / ".hidden.keras").touch()
    (folder / "folder.keras").mkdir()
    (folder / "notes.txt").touch()
    assert steps_of(source) == [10]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a.keras", "b.weights.h5"], r"\*\.keras files and \*\.weights\.h5 files \(a\.keras, b\.weights\.h5\)"),
        (["ckpt-1.index", "1/saved_model.pb"], r"checkpoints of tf\.train and SavedModel folders \(ckpt-1, 1\)"),
    ],
)
def test_a_folder_of_several_formats_is_refused(folder: Path, tmp_path: Path, names: list[str], told: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    source = FolderSource(folder, tmp_path / "staging", takes_variables=True)
    with pytest.raises(UnsupportedFormatError, match=rf"holds {told}; put .* into a folder of their own"):
        source.poll()


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            ["w-5.weights.json", "w-5_00000.weights.h5"],
            r"weights in several files \(w-5\.weights\.json\).*save them without max_shard_size",
        ),
        (["1/_CHECKPOINT_METADATA"], r"checkpoints of Orbax \(1\).*have keras\.callbacks\.ModelCheckpoint write"),
    ],
)
def test_what_keras_writes_and_nothing_reads_is_refused_with_what_to_write(
    folder: Path, tmp_path: Path, names: list[str], told: str
) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    with pytest.raises(UnsupportedFormatError, match=told):
        FolderSource(folder, tmp_path / "staging", takes_variables=True).check()


@pytest.mark.parametrize("name", ["model.weights.h5", "ckpt-1.index"])
def test_variables_without_their_model_are_refused_until_somebody_builds_it(
    folder: Path, source: FolderSource, name: str
) -> None:
    (folder / name).touch()
    with pytest.raises(UnsupportedFormatError, match="variables without their model; give the experiment"):
        source.check()
    with pytest.raises(UnsupportedFormatError):
        source.poll()
