"""The training journal."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from understudy.checkpoints import RunDir, TrainingJournal, UnsupportedFormatError, read_training_status, training
from understudy.checkpoints.training import TrainingProgress

_TRAINER = """
import sys
from pathlib import Path
from understudy.checkpoints import RunDir, TrainingJournal
with TrainingJournal(RunDir(Path(sys.argv[1]))):
    print("training", flush=True)
    sys.stdin.read()
"""


def test_before_any_training_there_is_no_status(run: RunDir) -> None:
    assert read_training_status(run, now=0.0) is None


def test_training_is_running_inside_the_block(run: RunDir) -> None:
    before = time.time()
    with TrainingJournal(run):
        status = read_training_status(run, now=time.time())
    assert status is not None
    assert (status.state, status.final_step, status.reason) == ("running", None, "")
    assert before <= status.heartbeat_at <= time.time()


def test_leaving_the_block_finishes_at_the_last_step(run: RunDir) -> None:
    with TrainingJournal(run) as journal:
        journal.record_step(100)
        journal.record_step(600)
    status = read_training_status(run, now=time.time() + 1e6)
    assert status is not None
    assert (status.state, status.step, status.final_step) == ("finished", 600, 600)


@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError("loss is NaN"), "ValueError: loss is NaN"), (KeyboardInterrupt(), "interrupted")]
)
def test_an_exception_is_the_reason_of_failure_and_goes_on(run: RunDir, error: BaseException, reason: str) -> None:
    def train() -> None:
        with TrainingJournal(run) as journal:
            journal.record_step(100)
            raise error

    with pytest.raises(type(error)):
        train()
    status = read_training_status(run, now=time.time())
    assert status is not None
    assert (status.state, status.step, status.final_step) == ("failed", 100, None)
    assert (status.reason, status.may_resume) == (reason, False)


def test_a_new_training_takes_the_place_of_an_old_one(run: RunDir) -> None:
    with TrainingJournal(run) as journal:
        journal.record_step(5)
    with TrainingJournal(run):
        status = read_training_status(run, now=time.time())
    assert status is not None
    assert status.state == "running"


def test_the_heart_beats_and_carries_the_step(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_HEARTBEAT_SECONDS", 0.01)
    with TrainingJournal(run) as journal:
        first = read_training_status(run, now=0.0)
        assert first is not None
        journal.record_step(42)
        deadline = time.monotonic() + 60
        while (status := read_training_status(run, now=0.0)) and status.step != 42:
            assert time.monotonic() < deadline
        assert status is not None
        assert status.heartbeat_at > first.heartbeat_at


def test_a_heartbeat_that_cannot_be_written_does_not_stop_training(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(training, "_HEARTBEAT_SECONDS", 0.01)
    with TrainingJournal(run):
        away = run.root.rename(run.root.with_name("away"))
        deadline = time.monotonic() + 60
        while "could not write the heartbeat" not in caplog.text:
            assert time.monotonic() < deadline
        away.rename(run.root)
    status = read_training_status(run, now=time.time())
    assert status is not None
    assert status.state == "finished"


def test_a_killed_trainer_counts_as_failed_once_it_has_been_silent(run: RunDir) -> None:
    command = [sys.executable, "-c", _TRAINER, str(run.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "training\n"
        trainer.send_signal(signal.SIGKILL)
    fresh = read_training_status(run, now=time.time(), stale_after_seconds=60.0)
    stale = read_training_status(run, now=time.time() + 100, stale_after_seconds=60.0)
    assert fresh is not None
    assert stale is not None
    assert (fresh.state, stale.state) == ("running", "failed")
    assert "silent for 100 s" in stale.reason


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 2},
        {"state": "asleep"},
        {"step": "many"},
        {"heartbeat_at": None},
        {"progress": []},
        {"step": 10**400},
        {"step": math.inf},
    ],
)
def test_another_journal_is_refused(run: RunDir, change: dict[str, object]) -> None:
    with TrainingJournal(run):
        pass
    fields = json.loads(run.training_json.read_text())
    run.training_json.write_text(json.dumps({**fields, **change}))
    with pytest.raises(UnsupportedFormatError, match=r"training\.json"):
        read_training_status(run, now=0.0)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff"])
def test_what_is_no_journal_is_refused(run: RunDir, content: bytes) -> None:
    run.root.mkdir()
    run.training_json.write_bytes(content)
    with pytest.raises(UnsupportedFormatError, match="not a training journal"):
        read_training_status(run, now=0.0)


def test_a_journal_that_is_no_regular_file_is_refused_at_once(run: RunDir) -> None:
    run.root.mkdir()
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.write_bytes(b"[" * 100_000)):
        make(run.training_json)
        with pytest.raises(UnsupportedFormatError, match="not a training journal"):
            read_training_status(run, now=0.0)
        run.training_json.unlink()


def test_progress_is_read_as_it_was_recorded_and_what_is_not_known_is_left_out(run: RunDir) -> None:
    progress = TrainingProgress(
        steps=600,
        metrics={"loss": 0.5, "ratio": math.inf},
        examples_per_second=1000.0,
        input_wait_share=0.25,
        remaining_seconds=7.5,
    )
    with TrainingJournal(run) as journal:
        journal.record_step(100, progress)
        journal.record_step(200)
    status = read_training_status(run, now=time.time())
    fields = json.loads(run.training_json.read_text(), parse_constant=pytest.fail)
    del fields["progress"]
    run.training_json.write_text(json.dumps(fields))
    of_another_version = read_training_status(run, now=time.time())

    assert status is not None
    assert (status.step, status.progress) == (200, progress)
    assert of_another_version is not None
    assert of_another_version.progress == TrainingProgress()
