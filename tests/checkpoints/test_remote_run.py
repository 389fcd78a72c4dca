"""Run folders in a bucket: what a publisher commits there, and what a reader takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from testkit.buckets import BucketServer, GcsServer, StoreServer, bucket_server, gcs_server
from testkit.in_process import until
from testkit.polling import polled, steps_of
from understudy.checkpoints import (
    AlreadyPublishedError,
    CheckpointGoneError,
    CheckpointPublisher,
    DamagedCheckpointError,
    LocationGoneError,
    LockHeldError,
    RunDir,
    Signer,
    SigningKey,
    TrainingJournal,
    UnsupportedLocationError,
    read_training_status,
)
from understudy.checkpoints.checkpoint_errors import RemoteStorageError
from understudy.checkpoints.remote.files import open_remote, open_store
from understudy.checkpoints.remote.publisher import OWNER_FILE, RemotePublisher
from understudy.checkpoints.remote.run_source import RemoteRunSource
from understudy.checkpoints.signing import accepted_keys, public_file, write_key_pair

from .conftest import Publish

FILES = ("manifest.json", "model.keras", "resume/state")


@pytest.fixture(scope="module")
def s3() -> Iterator[BucketServer]:
    with bucket_server() as server:
        yield server


@pytest.fixture(scope="module")
def gs() -> Iterator[GcsServer]:
    with gcs_server() as server:
        yield server


@dataclass(frozen=True, kw_only=True)
class Place:
    """A remote run folder and its server."""

    server: StoreServer
    url: str


@pytest.fixture
def s3_place(s3: BucketServer) -> Iterator[Place]:
    yield Place(server=s3, url=f"{s3.make_bucket()}/runs/one")
    s3.refuse = lambda _: None


@pytest.fixture
def gs_place(gs: GcsServer) -> Iterator[Place]:
    yield Place(server=gs, url=f"{gs.make_bucket()}/runs/one")
    gs.refuse, gs.knows_preconditions, gs.digest = lambda _: None, True, None


@pytest.fixture(params=["s3_place", "gs_place"])
def place(request: pytest.FixtureRequest) -> Place:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def source(place: Place, tmp_path: Path) -> RemoteRunSource:
    return _source(place.url, tmp_path / "mirror")


def _source(url: str, mirror: Path) -> RemoteRunSource:
    return RemoteRunSource(open_remote(url), RunDir(mirror))


def _publisher(run: RunDir, url: str, *, keep: int = 5) -> RemotePublisher:
    return RemotePublisher(run, open_store(url), keep=keep)


def _publish_all(run: RunDir, url: str, *, keep: int = 5) -> bool:
    with _publisher(run, url, keep=keep) as publisher:
        publisher.claim()
        return publisher.publish()


def _keys(step: int, *, files: tuple[str, ...] = FILES) -> list[str]:
    return [f"checkpoints/{step:012d}/{file}" for file in files]


def test_a_published_checkpoint_is_fetched_elsewhere_as_it_was_committed(
    place: Place, run: RunDir, publish: Publish, source: RemoteRunSource, tmp_path: Path
) -> None:
    assert steps_of(source) == []
    manifest = publish(3)
    publish(4, final=True)
    _publish_all(run, place.url)
    assert place.server.names(place.url) == sorted([*_keys(3), *_keys(4), OWNER_FILE])
    until(lambda: steps_of(source) == [3, 4])
    first, second = polled(source)
    assert (first.digest, first.final, second.final, first.copies) == (manifest.digest, False, True, True)
    taken = first.fetch(tmp_path / "taken")
    assert taken.manifest == manifest
    for name in FILES:
        assert (taken.directory / name).read_bytes() == (run.checkpoint(3) / name).read_bytes()
    assert [path.name for path in (tmp_path / "mirror" / "checkpoints" / f"{3:012d}").iterdir()] == ["manifest.json"]


def test_the_manifest_comes_last_and_is_deleted_first(s3_place: Place, run: RunDir, publish: Publish) -> None:
    publish(3)
    s3_place.server.requests.clear()
    _publish_all(run, s3_place.url)
    writes = [
        path.rpartition("/")[2] for method, path in s3_place.server.requests if method == "PUT" and f"{3:012d}" in path
    ]
    assert writes[-1] == "manifest.json"
    publish(4)
    deleted = []

    def note_what_is_left(environ: object) -> None:
        if isinstance(environ, dict) and environ["REQUEST_METHOD"] == "POST":
            deleted.append(s3_names_of_three())

    def s3_names_of_three() -> list[str]:
        s3_place.server.refuse = lambda _: None
        found = [name for name in s3_place.server.names(s3_place.url) if f"{3:012d}" in name]
        s3_place.server.refuse = note_what_is_left
        return found

    s3_place.server.refuse = note_what_is_left
    _publish_all(run, s3_place.url, keep=1)
    s3_place.server.refuse = lambda _: None
    assert deleted == [_keys(3), _keys(3, files=FILES[1:])]
    assert s3_place.server.names(s3_place.url) == sorted([*_keys(4), OWNER_FILE])


def test_what_has_no_manifest_is_never_taken_and_the_next_publisher_goes_on(
    place: Place, run: RunDir, publish: Publish, source: RemoteRunSource
) -> None:
    publish(3)
    place.server.refuse = lambda environ: (
        "503 Slow Down" if environ["REQUEST_METHOD"] == "PUT" and "manifest" in environ["PATH_INFO"] else None
    )
    with pytest.raises(RemoteStorageError, match=r"SlowDown|503"):
        _publish_all(run, place.url)
    assert place.server.names(place.url) == sorted([*_keys(3, files=FILES[1:]), OWNER_FILE])
    assert steps_of(source) == []
    place.server.refuse = lambda _: None
    place.server.requests.clear()
    _publish_all(run, place.url)
    written = [path.rpartition("/")[2] for method, path in place.server.requests if method == "PUT"]
    assert written == [OWNER_FILE, "manifest.json"]
    until(lambda: steps_of(source) == [3])


def test_only_one_of_two_publishers_commits_a_step(
    place: Place, run: RunDir, publish: Publish, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(3)
    _publish_all(run, place.url)
    other = RunDir(tmp_path / "other")
    CheckpointPublisher(other, keep=5).publish(
        3, lambda folder: _write(folder, b"other"), epoch=None, final=False, metrics={}, signature=None
    )
    with pytest.raises(AlreadyPublishedError, match=f"{place.url} holds the checkpoints of another run"):
        _publish_all(other, place.url)
    (other.root / OWNER_FILE).write_bytes((run.root / OWNER_FILE).read_bytes())  # as in a copy of the run folder
    before = {name: place.server.read(f"{place.url}/{name}") for name in place.server.names(place.url)}
    _publish_all(other, place.url)
    assert "step 3 is not published" in caplog.text
    assert "is of another checkpoint of this step" in caplog.text
    assert {name: place.server.read(f"{place.url}/{name}") for name in place.server.names(place.url)} == before


def test_a_manifest_is_written_only_where_there_is_none(place: Place) -> None:
    store = open_store(place.url)
    barrier = threading.Barrier(4)
    wrote = []

    def write(number: int) -> None:
        barrier.wait()
        if store.create("manifest.json", b"%d" % number):
            wrote.append(b"%d" % number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrote == [place.server.read(f"{place.url}/manifest.json")]


def test_a_store_of_s3_without_conditional_writes_is_refused(s3_place: Place, run: RunDir, publish: Publish) -> None:
    def forget_the_condition(environ: object) -> None:
        if isinstance(environ, dict):
            environ.pop("HTTP_IF_NONE_MATCH", None)

    publish(3)
    s3_place.server.refuse = forget_the_condition
    with pytest.raises(UnsupportedLocationError, match="this store ignores the condition that there be no such object"):
        _publish_all(run, s3_place.url)


def test_a_store_without_preconditions_is_refused(
    gs: GcsServer, gs_place: Place, run: RunDir, publish: Publish
) -> None:
    publish(3)
    gs.knows_preconditions = False
    with pytest.raises(UnsupportedLocationError, match="this store ignores the condition that there be no such object"):
        _publish_all(run, gs_place.url)


def test_on_google_cloud_the_manifest_comes_last_as_well(gs_place: Place, run: RunDir, publish: Publish) -> None:
    publish(3)
    _publish_all(run, gs_place.url)
    assert gs_place.server.requests[-1][1].endswith(f"{3:012d}/manifest.json")
    publish(4)
    _publish_all(run, gs_place.url, keep=1)
    assert gs_place.server.names(gs_place.url) == sorted([*_keys(4), OWNER_FILE])


def test_one_process_publishes_a_run_folder_at_a_time(place: Place, run: RunDir) -> None:
    with _publisher(run, place.url), pytest.raises(LockHeldError, match="let it publish"):
        _publisher(run, place.url).__enter__()


def test_damage_is_told_and_what_is_replaced_meanwhile_is_gone(
    place: Place, run: RunDir, publish: Publish, source: RemoteRunSource, tmp_path: Path
) -> None:
    publish(3)
    _publish_all(run, place.url)
    until(lambda: steps_of(source) == [3])
    (checkpoint,) = polled(source)
    model = f"{place.url}/checkpoints/{3:012d}/model.keras"
    whole = place.server.read(model)
    place.server.put(model, whole[:-1])
    with pytest.raises(DamagedCheckpointError, match=f"has {len(whole) - 1} bytes, its manifest says {len(whole)}"):
        checkpoint.fetch(tmp_path / "taken")
    place.server.put(model, bytes(len(whole)))
    with pytest.raises(DamagedCheckpointError, match="has SHA-256"):
        checkpoint.fetch(tmp_path / "taken")
    place.server.remove(model)
    with pytest.raises(DamagedCheckpointError, match="is missing"):
        checkpoint.fetch(tmp_path / "taken")
    place.server.remove(f"{place.url}/checkpoints/{3:012d}/manifest.json")
    with pytest.raises(CheckpointGoneError, match="deleted or replaced"):
        checkpoint.fetch(tmp_path / "taken")
    assert not (tmp_path / "taken").exists()
    until(lambda: steps_of(source) == [])


def test_a_store_that_is_gone_is_no_damage_and_what_is_known_stays(
    place: Place, run: RunDir, publish: Publish, source: RemoteRunSource, tmp_path: Path
) -> None:
    publish(3)
    _publish_all(run, place.url)
    until(lambda: steps_of(source) == [3])
    (checkpoint,) = polled(source)
    place.server.stop()
    try:
        with pytest.raises(RemoteStorageError):
            checkpoint.fetch(tmp_path / "taken")
        with pytest.raises(RemoteStorageError):
            until(lambda: polled(source) is None)
    finally:
        place.server.start()
    assert checkpoint.fetch(tmp_path / "taken").step == 3


def _state(mirror: Path) -> tuple[str, int | None] | None:
    status = read_training_status(RunDir(mirror), now=0.0)
    return None if status is None else (status.state, status.final_step)


def test_publishing_goes_on_while_training_runs_and_ends_with_it(
    place: Place, run: RunDir, publish: Publish, source: RemoteRunSource, tmp_path: Path
) -> None:
    with _publisher(run, place.url) as publisher:
        publisher.claim()
        following = threading.Thread(target=publisher.follow, args=(threading.Event(),))
        following.start()
        with TrainingJournal(run) as journal:
            publish(3)
            until(lambda: steps_of(source) == [3])
            place.server.stop()
            publish(4)
            place.server.start()
            until(lambda: steps_of(source) == [3, 4])
            publish(5, final=True)
            journal.record_step(5)
        following.join(30)
        assert not following.is_alive()
    until(lambda: steps_of(source) == [3, 4, 5] and _state(tmp_path / "mirror") == ("finished", 5))


def test_asked_to_end_it_publishes_what_is_committed(place: Place, run: RunDir, publish: Publish) -> None:
    stopped = threading.Event()
    stopped.set()
    publish(3)
    with _publisher(run, place.url) as publisher:
        publisher.claim()
        publisher.follow(stopped)
    assert steps_of(_source(place.url, run.root / "mirror")) == [3]


def test_what_is_gone_with_all_checkpoints_is_published_when_they_are_back(
    s3_place: Place, run: RunDir, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a mount that is lost after the folder was listed."""
    publish(1)
    away, listed = run.root / "away", RunDir.committed_steps

    def gone_once_they_are_listed(of: RunDir) -> list[int]:
        steps = listed(of)
        run.checkpoints.rename(away)
        return steps

    with RemotePublisher(run, open_store(s3_place.url), keep=10) as publisher:
        publisher.claim()
        with monkeypatch.context() as patched:
            patched.setattr(RunDir, "committed_steps", gone_once_they_are_listed)
            with pytest.raises(LocationGoneError):
                publisher.publish()
        away.rename(run.checkpoints)
        publisher.publish()
    assert any(name.endswith("manifest.json") for name in s3_place.server.names(s3_place.url))


def test_signatures_are_published_and_required(place: Place, run: RunDir, tmp_path: Path) -> None:
    private = tmp_path / "a.key"
    write_key_pair(private)
    signer = Signer(key=SigningKey.read(private), run="one")
    CheckpointPublisher(run, keep=5, signer=signer).publish(
        3, lambda folder: _write(folder, b"x"), epoch=None, final=False, metrics={}, signature=None
    )
    _publish_all(run, place.url)
    accepted = accepted_keys((public_file(private),), run="one", folder=tmp_path)
    source = RemoteRunSource(open_remote(place.url), RunDir(tmp_path / "mirror"), accepted=accepted)
    (checkpoint,) = polled(source)
    assert checkpoint.fetch(tmp_path / "taken").step == 3


def test_many_manifests_are_mirrored_in_parts_newest_first(
    place: Place, run: RunDir, publish: Publish, source: RemoteRunSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 6):
        publish(step)
    _publish_all(run, place.url)
    monkeypatch.setattr("understudy.checkpoints.remote.run_source._READ_AT_FIRST", 2)
    monkeypatch.setattr("understudy.checkpoints.remote.run_source._READING_SECONDS", 0.0)
    assert steps_of(source) == [4, 5]
    assert not source.is_complete
    assert [checkpoint.step for checkpoint in polled(source, wanted=[1])] == [1, 3, 4, 5]
    assert steps_of(source) == [1, 2, 3, 4, 5]
    assert source.is_complete


def test_a_manifest_too_large_is_ignored_by_name(
    place: Place, source: RemoteRunSource, caplog: pytest.LogCaptureFixture
) -> None:
    place.server.put(f"{place.url}/checkpoints/{3:012d}/manifest.json", bytes(2**24 + 1))
    assert steps_of(source) == []
    assert "manifest.json is ignored: it has more than" in caplog.text


def _write(folder: Path, content: bytes) -> None:
    (folder / "model.keras").write_bytes(content)


class _Outage(threading.Event):
    """A request to end that comes after many pauses, each over at once."""

    def __init__(self, pauses: int) -> None:
        super().__init__()
        self._left = pauses

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        assert 0 < timeout <= 30
        self._left -= 1
        if not self._left:
            self.set()
        return self.is_set()


def test_a_store_that_is_gone_for_a_day_is_tried_again_to_the_end(
    place: Place, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> bool:
        raise RemoteStorageError("gone")

    with _publisher(run, place.url) as publisher:
        monkeypatch.setattr(publisher, "publish", fail)
        with pytest.raises(RemoteStorageError, match="gone"):
            publisher.follow(_Outage(3000))


def test_an_object_that_google_cloud_sends_damaged_is_no_damaged_checkpoint(
    gs: GcsServer, gs_place: Place, run: RunDir, publish: Publish, tmp_path: Path
) -> None:
    publish(3)
    _publish_all(run, gs_place.url)
    source = _source(gs_place.url, tmp_path / "mirror")
    until(lambda: steps_of(source) == [3])
    (checkpoint,) = polled(source)
    gs.digest = "crc32c=AAAAAA==,md5=AAAAAAAAAAAAAAAAAAAAAA=="
    with pytest.raises(RemoteStorageError, match=r"[Cc]hecksum"):
        checkpoint.fetch(tmp_path / "taken")
    gs.digest = None
    assert checkpoint.fetch(tmp_path / "taken").step == 3
