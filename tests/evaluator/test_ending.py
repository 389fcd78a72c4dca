from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from understudy.checkpoints import RunDir, UnsupportedFormatError
from understudy.evaluator.ending import Ending, EndOfTraining

TIMEOUT_SECONDS = 100.0


class Stage:
    """A training journal, an evaluator and two clocks, all of which do what the test says."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.caught_up_at = 0.0
        self.last_sequence = 0
        self.run_dir = RunDir(folder)
        self.end = EndOfTraining(
            folder, self, timeout_seconds=TIMEOUT_SECONDS, clock=lambda: self.now, wall_clock=lambda: self.now
        )

    def is_caught_up(self, since: float) -> bool:
        return self.caught_up_at > since

    def training(self, state: str, **fields: Any) -> None:
        known = {"format_version": 1, "state": state, "step": 7, "final_step": None, "reason": "", "heartbeat_at": 0.0}
        self.run_dir.training_json.write_text(json.dumps({**known, "heartbeat_at": self.now, **fields}))

    def ending_after(self, seconds: float) -> Ending | None:
        self.now += seconds
        verdict = self.end.look()
        return None if verdict is None else verdict.ending


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_it_ends_once_training_has_finished_and_a_look_after_that_left_nothing(stage: Stage) -> None:
    stage.training("running")
    stage.caught_up_at = stage.now + 0.5
    assert stage.ending_after(1) is None
    stage.training("finished", final_step=7)
    assert stage.ending_after(1) is None
    stage.caught_up_at = stage.now + 0.5
    assert stage.ending_after(1) is Ending.FINISHED


def test_a_training_that_failed_or_fell_silent_is_told_from_one_that_finished(stage: Stage) -> None:
    stage.training("running")
    assert stage.ending_after(1) is None
    assert stage.ending_after(61) is None
    stage.caught_up_at = stage.now + 0.5
    verdict = stage.end.look()
    assert verdict is not None
    assert verdict.ending is Ending.FAILED
    assert "silent for 62 s" in verdict.text


def test_a_training_that_begins_again_is_waited_for(stage: Stage) -> None:
    stage.training("failed", reason="PeerLostError")
    assert stage.ending_after(1) is None
    stage.training("running")
    stage.caught_up_at = stage.now + 0.5
    assert stage.ending_after(1) is None
    stage.training("finished", final_step=9)
    assert stage.ending_after(1) is None


def test_time_runs_out_while_no_training_begins(stage: Stage) -> None:
    assert stage.ending_after(TIMEOUT_SECONDS - 1) is None
    assert stage.ending_after(1) is Ending.TIMED_OUT


def test_time_runs_out_while_nothing_more_is_evaluated(stage: Stage) -> None:
    stage.training("finished", final_step=7)
    assert stage.ending_after(0) is None
    assert stage.ending_after(TIMEOUT_SECONDS - 1) is None
    stage.last_sequence = 1
    assert stage.ending_after(TIMEOUT_SECONDS - 1) is None
    assert stage.ending_after(TIMEOUT_SECONDS) is Ending.TIMED_OUT


def test_a_file_that_is_no_journal_is_an_error(stage: Stage) -> None:
    stage.run_dir.training_json.write_text("{}")
    with pytest.raises(UnsupportedFormatError, match="not a training journal"):
        stage.end.look()
