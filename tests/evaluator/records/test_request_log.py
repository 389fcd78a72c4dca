"""The files of the request log: what they hold, their bounds, and what a full disk or a kill does to them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.preloading import preloaded
from testkit.small_disk import fill, mounted
from understudy.checkpoints.checkpoint_errors import LockHeldError
from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.evaluator.datasets.dataset_files import find_records, open_dataset
from understudy.evaluator.datasets.request_records import LoggedExample, LoggedRequest, read_logged
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.records import request_log
from understudy.evaluator.records.request_log import RequestLog, RequestLogOptions
from understudy.evaluator.types import Arrays

MIB = 1024 * 1024
HOUR_SECONDS = 3600
PATIENCE_SECONDS = 60

SIGNATURE = Signature(
    inputs=(
        TensorSpec(name="x", dtype="float32", shape=(None, 3)),
        TensorSpec(name="country", dtype="string", shape=(None,)),
    ),
    outputs=(TensorSpec(name="scores", dtype="float32", shape=(None, 2)),),
)


def request_of(value: float, *, examples: int = 2, **more: Any) -> LoggedRequest:
    country = np.array([f"secret-{value}-{row}".encode() for row in range(examples)], object)
    return LoggedRequest(
        inputs={"x": np.full((examples, 3), value, np.float32), "country": country, **more},
        outputs={"scores": np.array([[0.25, 0.75]] * examples, np.float32)},
        step=30,
        recorded_at=1000.5,
        method="/understudy.v1.PredictionService/Predict",
        caller="shop",
    )


def classes(request: LoggedRequest) -> Arrays:
    return {name: array.argmax(axis=1) for name, array in request.outputs.items()}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk") as disk:
        yield disk


class Log:
    """A request log with its folder, its metrics and a clock of its own."""

    def __init__(self, folder: Path, *, targets_of: Any = None, **options: Any) -> None:
        self.folder = folder
        self.requests = 0
        self.drops: Counter[str] = Counter()
        self.size = 0
        self.now = time.time()
        chosen = {"folder": folder, "max_bytes": MIB, "max_age_seconds": HOUR_SECONDS, **options}
        self.elapsed = 0.0
        self.log = RequestLog(
            RequestLogOptions(**chosen),
            self,
            targets_of=targets_of,
            clock=lambda: self.now,
            monotonic=lambda: self.elapsed,
        )

    @property
    def files(self) -> list[Path]:
        return find_records(self.folder)

    def write(self, *requests: LoggedRequest) -> None:
        """Take requests, and let a file become old enough."""
        for request in requests:
            self.log.take(request)
        self.pass_time(request_log.FLUSH_SECONDS)
        self.log.tick()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.elapsed += seconds

    def examples(self) -> list[LoggedExample]:
        return list(read_logged(self.files, SIGNATURE))

    def written(self, requests: int) -> None:
        self.requests += requests

    def dropped(self, reason: str, requests: int = 1) -> None:
        self.drops[reason] += requests

    def size_changed(self, size: int) -> None:
        self.size = size


def test_a_clock_that_was_set_back_delays_no_file(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.log.take(request_of(1.0))
    log.now -= HOUR_SECONDS
    log.write()
    assert log.requests == 1


def test_requests_are_read_back_as_they_were(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.write(request_of(1.0), request_of(2.0, examples=1))
    found = log.examples()

    assert [example.inputs["x"].tolist() for example in found] == [[1.0] * 3, [1.0] * 3, [2.0] * 3]
    assert [example.inputs["country"].item() for example in found] == [
        b"secret-1.0-0",
        b"secret-1.0-1",
        b"secret-2.0-0",
    ]
    assert found[0].answers["scores"].tolist() == [0.25, 0.75]
    assert (found[0].step, found[0].recorded_at) == (30, 1000.5)
    assert (found[0].method, found[0].caller) == ("/understudy.v1.PredictionService/Predict", "shop")
    assert log.requests == 2
    assert log.size == sum(file.stat().st_size for file in log.files)


@pytest.mark.parametrize(("targets_of", "expected"), [(None, [[0.25, 0.75]] * 2), (classes, [1, 1])])
def test_the_files_are_a_dataset_for_evaluations(tmp_path: Path, targets_of: Any, expected: Any) -> None:
    log = Log(tmp_path / "log", targets_of=targets_of)
    log.write(request_of(1.0))
    (batch,) = open_dataset("live", log.folder).batches(SIGNATURE, 10)
    assert batch.inputs["x"].tolist() == [[1.0] * 3] * 2
    assert batch.targets["targets"].tolist() == expected


def test_nothing_of_a_redacted_input_is_in_the_files(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", redact=("country", "x"))
    log.write(request_of(13.5))
    (file,) = log.files
    assert b"secret" not in file.read_bytes()
    assert np.float32(13.5).tobytes() not in file.read_bytes()
    first = log.examples()[0]
    assert first.redacted == ("country", "x")
    assert (first.inputs["x"].tolist(), first.inputs["country"].item()) == ([0.0] * 3, b"")


def test_a_request_without_an_input_to_redact_is_not_logged(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", redact=("county",))
    log.write(request_of(1.0))
    assert log.files == []
    assert log.drops == {"redaction": 1}


def test_only_their_owner_may_read_the_files(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.write(request_of(1.0))
    assert stat.S_IMODE(log.folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in log.files] == [0o600]


def test_no_name_in_a_request_becomes_part_of_a_path(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    evil: dict[str, Any] = {
        "../../outside": np.zeros((2, 1)),
        "/etc/passwd\0": np.zeros((2, 1)),
        "request/step": np.zeros((2, 1)),
    }
    log.write(request_of(1.0, **evil)._replace(caller="../../caller", method="/../method"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]
    assert {path.parent for path in log.folder.rglob("*")} == {log.folder}


def test_the_oldest_files_go_when_the_log_is_full(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", max_bytes=64 * 1024)
    (tmp_path / "log" / "notes.txt").write_text("not the log's")
    for value in range(40):
        log.write(request_of(float(value), examples=8))
        assert sum(file.stat().st_size for file in log.files) <= 64 * 1024
    kept = sorted({float(example.inputs["x"][0]) for example in log.examples()})
    assert 5 < len(kept) < 40
    assert kept == [float(value) for value in range(40 - len(kept), 40)]
    assert (tmp_path / "log" / "notes.txt").exists()


def test_a_request_that_is_larger_than_a_file_is_not_logged(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", max_bytes=8192)
    log.write(request_of(1.0, examples=100))
    assert log.files == []
    assert log.drops == {"too_large": 1}


def test_old_files_go_without_new_requests(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.write(request_of(1.0))
    log.pass_time(HOUR_SECONDS - 120)
    log.log.tick()
    assert len(log.files) == 1
    log.pass_time(240)
    log.log.tick()
    assert log.files == []


def test_one_service_writes_into_a_folder(tmp_path: Path) -> None:
    first = Log(tmp_path / "log")
    with pytest.raises(LockHeldError, match="--request-log"):
        Log(tmp_path / "log")
    first.log.close()
    Log(tmp_path / "log").log.close()


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"file.* cannot be written to"):
        Log(tmp_path / "file")


def test_a_full_disk_costs_requests_and_is_told_once(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = Log(small_disk / "log", max_bytes=8 * MIB)
    log.write(request_of(1.0))
    filler = fill(small_disk, leave=8192)
    for _ in range(3):
        log.write(request_of(2.0, examples=100))
    assert log.drops == {"disk": 3}
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["sampled requests are not logged"]
    assert [file.suffix for file in log.folder.iterdir() if file.name != "lock"] == [".tfrecord"]

    filler.unlink()
    log.write(request_of(3.0))
    assert sorted({float(example.inputs["x"][0]) for example in log.examples()}) == [1.0, 3.0]


KILLED = """
import os, signal, sys
from pathlib import Path
from understudy.evaluator.records import request_log
from evaluator.records.test_request_log import Log, request_of

log = Log(Path(sys.argv[1]))
log.write(request_of(1.0))
request_log.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)  # written, not renamed
log.write(request_of(2.0))
"""


def test_a_process_that_is_killed_while_it_writes_leaves_whole_files(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "log")],
        env={**os.environ, **preloaded()},
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert killed.returncode not in (0, 1)
    assert len(list((tmp_path / "log").glob("*.part"))) == 1

    log = Log(tmp_path / "log")
    assert [float(example.inputs["x"][0]) for example in log.examples()] == [1.0, 1.0]
    assert list(log.folder.glob("*.part")) == []
