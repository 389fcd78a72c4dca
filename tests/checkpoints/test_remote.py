"""Folders of foreign checkpoints that are not on a local disk: a bucket of S3, and TensorFlow's memory file system."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tensorflow as tf

from testkit.buckets import BucketServer, GcsServer, bucket_server, gcs_server
from testkit.polling import polled, steps_of
from testkit.small_disk import fill, mounted
from understudy.checkpoints import DamagedCheckpointError, FolderSource, UnsupportedLocationError
from understudy.checkpoints.checkpoint_errors import RemoteStorageError, StorageRefusalError
from understudy.checkpoints.remote.files import FileStatus, RemoteFiles, open_remote, usable
from understudy.checkpoints.remote.folder_source import RemoteFolderSource

from .conftest import WriteKeras


@dataclass(frozen=True, kw_only=True)
class Place:
    """A remote folder, and how a writer changes it."""

    url: str
    upload: Callable[[Path, str], None]
    remove: Callable[[str], None]


@pytest.fixture(scope="module")
def s3() -> Iterator[BucketServer]:
    with bucket_server() as server:
        yield server


@pytest.fixture(scope="module")
def gs() -> Iterator[GcsServer]:
    with gcs_server() as server:
        yield server


@pytest.fixture(params=["ram", "s3", "gs"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param != "ram":
        server = request.getfixturevalue(request.param)
        yield Place(url=f"{server.make_bucket()}/models", upload=server.upload, remove=server.remove)
        return
    url = f"ram://{uuid.uuid4().hex}"
    yield Place(url=url, upload=_upload, remove=tf.io.gfile.remove)
    if tf.io.gfile.exists(url):
        tf.io.gfile.rmtree(url)


@pytest.fixture
def source(place: Place, tmp_path: Path) -> RemoteFolderSource:
    return _source(place.url, tmp_path)


def _source(url: str, tmp_path: Path) -> RemoteFolderSource:
    return _source_of(open_remote(url), tmp_path)


def _source_of(files: RemoteFiles, tmp_path: Path) -> RemoteFolderSource:
    local = FolderSource(tmp_path / "mirror", tmp_path / "staging", is_mirror=True)
    return RemoteFolderSource(files, tmp_path / "mirror", local)


def _upload(path: Path, url: str) -> None:
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            target = url if file == path else f"{url}/{file.relative_to(path).as_posix()}"
            tf.io.gfile.makedirs(target.rpartition("/")[0])
            tf.io.gfile.copy(str(file), target, overwrite=True)


def test_checkpoints_elsewhere_are_fetched_and_taken(
    place: Place, source: RemoteFolderSource, tmp_path: Path, write_keras: WriteKeras
) -> None:
    assert steps_of(source) == []
    file = write_keras(tmp_path / "a.keras", iterations=7)
    place.upload(file, f"{place.url}/a.keras")
    place.upload(file, f"{place.url}/train.log")
    place.upload(file, f"{place.url}/logs/b.keras")
    (checkpoint,) = polled(source)
    assert checkpoint.step == 7
    assert checkpoint.fetch(tmp_path / "pinned").model_file.read_bytes() == file.read_bytes()
    assert [path.name for path in (tmp_path / "mirror").iterdir()] == ["a.keras"]


def test_what_is_overwritten_or_deleted_there_is_so_here(
    place: Place, source: RemoteFolderSource, tmp_path: Path, write_keras: WriteKeras
) -> None:
    place.upload(write_keras(tmp_path / "a.keras", iterations=7), f"{place.url}/a.keras")
    assert steps_of(source) == [7]
    place.upload(write_keras(tmp_path / "a.keras", iterations=8, weight=2), f"{place.url}/a.keras")
    assert steps_of(source) == [8]
    place.remove(f"{place.url}/a.keras")
    assert steps_of(source) == []


def test_saved_models_elsewhere_come_as_whole_folders(place: Place, source: RemoteFolderSource, tmp_path: Path) -> None:
    module = tf.Module()
    module.weight = tf.Variable(0.0)
    for step in (3, 4):
        module.weight.assign(step)
        tf.saved_model.save(module, tmp_path / str(step))
        place.upload(tmp_path / str(step), f"{place.url}/{step}")
    assert steps_of(source) == [3, 4]
    for file in (tmp_path / "3").rglob("*"):
        if file.is_file():
            place.remove(f"{place.url}/{file.relative_to(tmp_path)}")
    source.fetch()
    assert sorted(path.name for path in (tmp_path / "mirror").iterdir()) == ["4"]


class _NoCopies:
    """Files of which none may be copied."""

    def __init__(self, files: RemoteFiles) -> None:
        self.url = files.url
        self.list = files.list
        self.status = files.status

    def copy(self, name: str, target: Path, *, size_bytes: int) -> FileStatus:
        raise AssertionError(f"{name} is copied to {target}, {size_bytes} bytes")


def test_a_fetch_for_which_there_is_no_room_fails_instead_of_being_shorter(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(200_000))
    place.upload(file, f"{place.url}/file")
    with mounted(tmp_path / "disk") as disk:
        fill(disk, leave=100_000)
        with pytest.raises(OSError, match=r"(?i)no space left on device"):
            open_remote(place.url).copy("file", disk / "copy", size_bytes=200_000)


def test_a_copy_that_is_there_is_not_fetched_again(place: Place, tmp_path: Path, write_keras: WriteKeras) -> None:
    place.upload(write_keras(tmp_path / "a.keras", iterations=7), f"{place.url}/a.keras")
    assert steps_of(_source(place.url, tmp_path)) == [7]
    assert steps_of(_source_of(_NoCopies(open_remote(place.url)), tmp_path)) == [7]


def test_a_scheme_that_tensorflow_lacks_is_refused_with_the_alternative(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLocationError, match=r"cannot read other://bucket/run: .*; mount it"):
        _source("other://bucket/run", tmp_path).check()


def test_a_number_above_the_highest_step_is_refused_by_name(
    place: Place, source: RemoteFolderSource, tmp_path: Path, write_keras: WriteKeras
) -> None:
    place.upload(write_keras(tmp_path / "a.keras", weight=1), f"{place.url}/model-{2**63}.keras")
    place.upload(write_keras(tmp_path / "b.keras", weight=2, iterations=8), f"{place.url}/b.keras")
    (refused,) = [checkpoint for checkpoint in polled(source) if checkpoint.step != 8]
    with pytest.raises(DamagedCheckpointError, match=f"model-{2**63}.keras: the number {2**63} is above the highest"):
        refused.fetch(tmp_path / "pinned")


def test_a_second_source_on_the_same_mirror_deletes_nothing_before_it_polls(
    place: Place, source: RemoteFolderSource, tmp_path: Path
) -> None:
    source.poll()
    half = tmp_path / "mirror" / ".tmp-half"
    half.touch()
    other = _source(place.url, tmp_path)
    assert half.exists()
    other.poll()
    assert not half.exists()


def test_names_that_no_local_file_can_have_are_left_out() -> None:
    hostile = ["../a.keras", "/etc/b.keras", "x/../../c.keras", "d//e.keras", "./f.keras", "..", "g/", ""]
    assert usable([*hostile, "3/saved_model.pb", "h.keras", "h.keras/saved_model.pb"]) == [
        "3/saved_model.pb",
        "h.keras/saved_model.pb",
    ]


def test_keys_that_lead_out_of_the_folder_are_never_written(
    s3: BucketServer, tmp_path: Path, write_keras: WriteKeras
) -> None:
    bucket = s3.make_bucket()
    file = write_keras(tmp_path / "a.keras", iterations=7)
    for name in ("../out.keras", "x/../../out.keras", "b.keras/c"):
        s3.upload(file, f"{bucket}/models/{name}")
    s3.upload(file, f"{bucket}/models/a.keras")
    assert steps_of(_source(f"{bucket}/models", tmp_path)) == [7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.keras", "mirror", "staging"]


def test_a_bucket_that_an_operator_must_mend_is_refused_by_name(
    s3: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageRefusalError, match=r"s3://no-such-bucket is refused: .*NoSuchBucket"):
        _source("s3://no-such-bucket", tmp_path).check()
    bucket = s3.make_bucket()
    monkeypatch.setattr(s3, "refuse", lambda _: "403 Access Denied")
    with pytest.raises(
        StorageRefusalError, match=r"is refused: .*AccessDenied.*; check the bucket, and the credentials"
    ):
        _source(bucket, tmp_path).check()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(StorageRefusalError, match="credentials"):
        _source(bucket, tmp_path).check()
    for url in ("s3://", "gs://"):
        with pytest.raises(UnsupportedLocationError, match="names no bucket"):
            open_remote(url)


def test_a_bucket_of_google_cloud_that_an_operator_must_mend_is_refused_by_name(
    gs: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageRefusalError, match=r"gs://no-such-bucket is refused: 404 .*; check the bucket"):
        _source("gs://no-such-bucket", tmp_path).check()
    bucket = gs.make_bucket()
    for name in gs.environ:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(
        StorageRefusalError, match=f"{bucket} cannot be used: .*; check the credentials of Google Cloud"
    ):
        _source(bucket, tmp_path).check()


def test_a_store_that_is_gone_says_nothing_about_checkpoints(
    s3: BucketServer, tmp_path: Path, write_keras: WriteKeras, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{s3.make_bucket()}/models"
    s3.upload(write_keras(tmp_path / "a.keras", iterations=7), f"{url}/a.keras")
    source = _source(url, tmp_path)
    s3.stop()
    try:
        with pytest.raises(RemoteStorageError, match=f"{url}: .*connect") as caught:
            source.poll()
        assert not isinstance(caught.value, StorageRefusalError)
    finally:
        s3.start()
    monkeypatch.setattr(s3, "refuse", lambda environ: "503 Slow Down" if environ["REQUEST_METHOD"] == "GET" else None)
    with pytest.raises(RemoteStorageError, match="SlowDown"):
        source.poll()
    monkeypatch.setattr(s3, "refuse", lambda _: None)
    assert steps_of(_source(url, tmp_path)) == [7]


@pytest.mark.parametrize(
    ("url", "library", "extra"), [("s3://bucket", "boto3", "s3"), ("gs://bucket", "google.cloud.storage", "gcs")]
)
def test_without_the_library_of_a_bucket_it_is_said_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, url: str, library: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UnsupportedLocationError, match=rf"pip install 'understudy\[{extra}\]'"):
        open_remote(url)
