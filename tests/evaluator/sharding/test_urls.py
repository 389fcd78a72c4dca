"""Evaluation and prediction of examples in a bucket: the bits of the same files on a disk."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from testkit.buckets import BucketServer
from understudy.checkpoints.remote import reader
from understudy.cli.main import main
from understudy.evaluator.sharding.work import DataSource, described, open_data, timeouts_for

from .conftest import BATCH_SIZE, EXAMPLES, FIRST_FILE, Case, write_records

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_starts")]


def said(status: int, *arguments: object) -> str:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result.output if status else result.stdout


def run_options(case: Case, *more: object) -> tuple[object, ...]:
    return ("--run-dir", case.run, "--version", "latest", "--batch-size", BATCH_SIZE, *more)


@pytest.mark.parametrize(
    ("store", "place", "workers"),
    [
        ("bucket", "data.npz", 2),
        ("bucket", "records", 1),
        ("google_bucket", "data.npz", 1),
        ("google_bucket", "records", 2),
    ],
)
def test_examples_in_a_bucket_are_scored_as_those_on_a_disk(
    case: Case,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    *,
    store: str,
    place: str,
    workers: int,
) -> None:
    bucket = request.getfixturevalue(store)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = run_options(case, "--workers", workers, "--json")
    found = json.loads(said(0, "evaluate", f"{bucket}/{place}", *options))
    assert (found["metrics"], found["examples"], found["notes"]) == (dict(case.score), EXAMPLES, [])
    assert not list(tmp_path.glob("understudy-*"))


def test_files_and_urls_are_one_dataset_in_the_order_given(case: Case, bucket: str, tmp_path: Path) -> None:
    write_records(tmp_path / "a.tfrecord", np.load(case.file), slice(0, FIRST_FILE))
    files = (tmp_path / "a.tfrecord", f"{bucket}/records/b.tfrecord.gz")
    found = json.loads(said(0, "evaluate", *files, *run_options(case, "--workers", 2, "--json")))
    assert found["metrics"] == dict(case.score)


def test_predictions_of_examples_in_a_bucket_are_those_of_the_files(case: Case, bucket: str, tmp_path: Path) -> None:
    output = tmp_path / "out"
    options = run_options(case, "--workers", 2, "--output", output)
    assert f"wrote {EXAMPLES} examples" in said(0, "predict", f"{bucket}/records", *options)
    files = [file["name"] for file in json.loads((output / "manifest.json").read_bytes())["files"]]
    for name, expected in case.outputs.items():
        np.testing.assert_array_equal(np.concatenate([np.load(output / file)[name] for file in files]), expected)


def test_a_worker_fetches_only_the_file_of_its_examples(s3: BucketServer, bucket: str, case: Case) -> None:
    source = DataSource(name="files", paths=(f"{bucket}/records",))
    dataset = open_data(source)
    s3.requests.clear()
    other = open_data(described(source, dataset))
    assert (other.digest, other.examples, other.columns) == (dataset.digest, EXAMPLES, dataset.columns)
    assert not s3.requests
    signature = case.signature
    (batch,) = other.batches(signature, 100, first_example=FIRST_FILE + 3)
    assert batch.examples == EXAMPLES - FIRST_FILE - 3
    assert [path.rpartition("/")[2] for _, path in s3.requests] == ["b.tfrecord.gz"]


def test_a_worker_that_fetches_files_has_time_for_it(bucket: str) -> None:
    source = DataSource(name="files", paths=(f"{bucket}/records",))
    timeouts = timeouts_for(described(source, open_data(source)))
    assert timeouts is not None
    assert timeouts.least >= 30
    assert timeouts_for(source) is None


def test_a_store_that_fails_for_a_while_is_asked_again(
    s3: BucketServer, bucket: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_FIRST_PAUSE_SECONDS", 0.0)
    failures = iter(["503 Service Unavailable"] * 4)

    def refuse(environ: Mapping[str, Any]) -> str | None:
        is_fetched = environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"].endswith("data.npz")
        return next(failures, None) if is_fetched else None

    monkeypatch.setattr(s3, "refuse", refuse)
    found = json.loads(said(0, "evaluate", f"{bucket}/data.npz", *run_options(case, "--json")))
    assert found["metrics"] == dict(case.score)
    assert next(failures, None) is None


def test_a_store_that_fails_for_long_is_an_error(
    s3: BucketServer, bucket: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(
        s3, "refuse", lambda environ: "503 Service Unavailable" if "npz" in environ["PATH_INFO"] else None
    )
    assert f"{bucket}" in said(1, "evaluate", f"{bucket}/data.npz", *run_options(case))


def test_a_file_that_is_replaced_while_it_is_read_is_an_error(s3: BucketServer, bucket: str, case: Case) -> None:
    url = f"{s3.make_bucket()}/a.tfrecord"
    s3.put(url, s3.read(f"{bucket}/records/a.tfrecord"))
    source = DataSource(name="files", paths=(url,))
    known = described(source, open_data(source))
    s3.put(url, s3.read(f"{bucket}/records/a.tfrecord")[::-1])
    with pytest.raises(Exception, match="has changed since it was first read; start again"):
        next(open_data(known).batches(case.signature, 10))


def test_what_cannot_be_read_is_one_sentence_that_names_the_url(
    s3: BucketServer, bucket: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = f"{bucket}/damaged.npz"
    s3.put(damaged, b"PK no array")
    for url, text in (
        (f"{bucket}/missing.npz", f"there is no object {bucket}/missing.npz"),
        (f"{bucket}/nothing/", f"there are no TFRecord files in {bucket}/nothing/"),
        (damaged, f"{damaged} is not a readable .npy or .npz file"),
        ("s3://no-such-bucket/data", "NoSuchBucket"),
        ("other://place/data.npz", "TensorFlow cannot read other://place/data.npz"),
    ):
        for command in (["evaluate"], ["predict", "--output", tmp_path / "out"]):
            assert text in " ".join(said(1, *command, url, *run_options(case)).split())
    with monkeypatch.context() as patch:
        patch.setattr(s3, "refuse", lambda _: "403 Forbidden")
        assert "data.npz is refused" in said(1, "evaluate", f"{bucket}/data.npz", *run_options(case))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "boto3", None)
        wanted = "install it with: pip install 'understudy[s3]'"
        assert wanted in said(1, "evaluate", f"{bucket}/data.npz", *run_options(case))


@pytest.mark.parametrize("command", [["evaluate"], ["predict"]])
def test_a_server_is_not_sent_a_url(command: list[str]) -> None:
    assert "URLs go with --run-dir; a server is sent a file" in said(2, *command, "s3://bucket/data.npz")
