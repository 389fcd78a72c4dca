from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from understudy.checkpoints import RunDir, UnsupportedFormatError
from understudy.evaluator.evaluation.training_end import ExitReason, TrainingEndMonitor, TrainingWatch

TIMEOUT_SECONDS = 250.0


class TrainingHarness:
    """A training journal, an evaluator and two clocks, all of which do what the test says."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.caught_up_at = 0.0
        self.last_sequence = 0
        self.run_dir = RunDir(folder)
        self.end = TrainingEndMonitor(folder, self, timeout_seconds=TIMEOUT_SECONDS, clock=lambda: self.now)

    def is_caught_up(self, since: float) -> bool:
        return self.caught_up_at > since

    def training(self, state: str, **fields: Any) -> None:
        known = {"format_version": 1, "state": state, "step": 7, "final_step": None, "reason": "", "heartbeat_at": 0.0}
        self.run_dir.training_json.write_text(json.dumps({**known, "heartbeat_at": self.now, **fields}))

    def exit_after(self, seconds: float) -> ExitReason | None:
        self.now += seconds
        service_exit = self.end.check()
        return None if service_exit is None else service_exit.reason


@pytest.fixture
def harness(tmp_path: Path) -> TrainingHarness:
    return TrainingHarness(tmp_path)


def test_it_ends_once_training_has_finished_and_a_look_after_that_left_nothing(harness: TrainingHarness) -> None:
    harness.training("running")
    harness.caught_up_at = harness.now + 0.5
    assert harness.exit_after(1) is None
    harness.training("finished", final_step=7)
    assert harness.exit_after(1) is None
    harness.caught_up_at = harness.now + 0.5
    assert harness.exit_after(1) is ExitReason.FINISHED


def test_a_training_that_failed_is_told_from_one_that_finished(harness: TrainingHarness) -> None:
    harness.training("running")
    assert harness.exit_after(1) is None
    harness.training("failed", reason="NonFiniteLossError")
    assert harness.exit_after(1) is None
    harness.caught_up_at = harness.now + 0.5
    assert harness.exit_after(1) is ExitReason.FAILED


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_training_that_may_be_started_again_has_failed_when_it_was_not_in_time(
    harness: TrainingHarness, caplog: pytest.LogCaptureFixture, *, is_silent: bool
) -> None:
    """A lost machine leaves a journal that says it runs; the others record that they are to be started again."""
    harness.training("running")
    assert harness.exit_after(1) is None
    if not is_silent:
        harness.training("failed", reason="PeerLostError: worker 1", may_resume=True)
    assert harness.exit_after(61) is None
    harness.caught_up_at = harness.now + 0.5
    assert harness.exit_after(TIMEOUT_SECONDS - 1) is None
    assert [record.getMessage().partition("; ")[2] for record in caplog.records] == [
        "waiting for up to 250 s for it to start again"
    ]
    harness.now += 1
    service_exit = harness.end.check()
    assert service_exit is not None
    assert service_exit.reason is ExitReason.FAILED
    assert ("silent for 311 s" if is_silent else "PeerLostError") in service_exit.message


def test_a_training_of_a_machine_whose_clock_differs_runs_while_its_heart_beats(harness: TrainingHarness) -> None:
    for beat in range(100):
        harness.training("running", heartbeat_at=float(beat))
        harness.caught_up_at = harness.now
        assert harness.exit_after(5) is None
    harness.training("finished", final_step=7)
    assert harness.exit_after(1) is None
    harness.caught_up_at = harness.now + 0.5
    assert harness.exit_after(1) is ExitReason.FINISHED


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_a_training_is_shown_as_it_is_whatever_the_clock_of_its_machine_says(
    harness: TrainingHarness, caplog: pytest.LogCaptureFixture, hours: int
) -> None:
    watch = TrainingWatch(harness.run_dir.root, clock=lambda: harness.now, wall_clock=lambda: harness.now + 1e9)
    offset = 1e9 + 3600 * hours

    def shown_after(seconds: float, *, beats: bool) -> str:
        harness.now += seconds
        if beats:
            harness.training("running", heartbeat_at=harness.now + offset)
        status = watch.read()
        assert status is not None
        return status.state

    for _ in range(3):
        assert shown_after(60, beats=True) == "running"
    assert shown_after(50, beats=False) == "running"
    assert shown_after(20, beats=False) == "failed"
    assert shown_after(0, beats=True) == "running"
    side = {-1: "behind", 1: "ahead of"}.get(hours)
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said == ([] if side is None else [f"the trainer's clock is 3600 s {side} this machine's"])


@pytest.mark.parametrize(("age_seconds", "state"), [(0, "running"), (40, "running"), (70, "failed")])
def test_a_heartbeat_that_was_there_before_is_compared_with_this_machine_s_clock_if_no_other_one_follows(
    harness: TrainingHarness, age_seconds: float, state: str
) -> None:
    watch = TrainingWatch(harness.run_dir.root, clock=lambda: harness.now, wall_clock=lambda: 1e9 + age_seconds)
    harness.training("running", heartbeat_at=1e9)
    shown = []
    for _ in range(2):
        status = watch.read()
        assert status is not None
        shown.append(status)
        harness.now += 15
    assert [status.state for status in shown] == ["running", state]
    assert shown[1].reason == ("the trainer has been silent for 85 s" if state == "failed" else "")


def test_what_is_no_journal_is_not_shown(harness: TrainingHarness) -> None:
    watch = TrainingWatch(harness.run_dir.root)
    assert watch.read() is None
    harness.run_dir.training_json.write_text("{}")
    assert watch.read() is None


def test_a_training_that_begins_again_is_waited_for(harness: TrainingHarness) -> None:
    harness.training("failed", reason="PeerLostError")
    assert harness.exit_after(1) is None
    harness.training("running")
    harness.caught_up_at = harness.now + 0.5
    assert harness.exit_after(1) is None
    harness.training("finished", final_step=9)
    assert harness.exit_after(1) is None


def test_time_runs_out_while_no_training_begins(harness: TrainingHarness) -> None:
    assert harness.exit_after(TIMEOUT_SECONDS - 1) is None
    assert harness.exit_after(1) is ExitReason.TIMED_OUT


def test_time_runs_out_while_nothing_more_is_evaluated(harness: TrainingHarness) -> None:
    harness.training("finished", final_step=7)
    assert harness.exit_after(0) is None
    assert harness.exit_after(TIMEOUT_SECONDS - 1) is None
    harness.last_sequence = 1
    assert harness.exit_after(TIMEOUT_SECONDS - 1) is None
    assert harness.exit_after(TIMEOUT_SECONDS) is ExitReason.TIMED_OUT


def test_a_file_that_is_no_journal_is_an_error(harness: TrainingHarness) -> None:
    harness.run_dir.training_json.write_text("{}")
    with pytest.raises(UnsupportedFormatError, match="not a training journal"):
        harness.end.check()
