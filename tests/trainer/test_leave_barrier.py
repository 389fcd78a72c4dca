"""How the tasks of a cluster part after the last step."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import tensorflow as tf

from understudy.checkpoints import RunDir, TrainingJournal
from understudy.trainer.leaving import wait_to_end_early, wait_to_leave

LONG = 60.0


def torn() -> None:
    raise tf.errors.UnavailableError(None, None, "Socket closed")


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_a_worker_that_heard_nothing_ends_well_once_the_chief_has_finished(run_dir: RunDir) -> None:
    journal = TrainingJournal(run_dir)
    journal.__enter__()
    finish = threading.Timer(0.2, journal.__exit__, (None, None, None))
    began = time.monotonic()
    finish.start()
    wait_to_leave(torn, run_dir, is_chief=False, timeout_seconds=LONG)
    assert 0.2 <= time.monotonic() - began < LONG
    finish.join()


def test_a_worker_stays_until_the_chief_has_finished(run_dir: RunDir) -> None:
    journal = TrainingJournal(run_dir)
    journal.__enter__()
    worker = threading.Thread(
        target=wait_to_leave, args=(lambda: None, run_dir), kwargs={"is_chief": False, "timeout_seconds": LONG}
    )
    worker.start()
    worker.join(0.3)
    assert worker.is_alive()
    journal.__exit__(None, None, None)
    worker.join(LONG)
    assert not worker.is_alive()


@pytest.mark.parametrize("is_chief", [True, False])
def test_a_task_that_dies_before_its_last_step_fails_the_others(run_dir: RunDir, *, is_chief: bool) -> None:
    with TrainingJournal(run_dir), pytest.raises(tf.errors.UnavailableError):
        wait_to_leave(torn, run_dir, is_chief=is_chief, timeout_seconds=0.2)


def test_a_worker_does_not_wait_for_a_chief_that_has_failed(run_dir: RunDir) -> None:
    journal = TrainingJournal(run_dir)
    journal.__enter__()
    journal.__exit__(RuntimeError, RuntimeError("no more"), None)
    with pytest.raises(tf.errors.UnavailableError):
        wait_to_leave(torn, run_dir, is_chief=False, timeout_seconds=LONG)


def test_a_worker_does_not_wait_for_ever_for_a_chief_that_writes_nothing(run_dir: RunDir) -> None:
    began = time.monotonic()
    wait_to_leave(lambda: None, run_dir, is_chief=False, timeout_seconds=0.2)
    assert 0.2 <= time.monotonic() - began < LONG


def test_a_task_that_ends_early_takes_no_other_for_dead_once_all_is_saved() -> None:
    wait_to_end_early(torn, is_saved=lambda: True)
    with pytest.raises(tf.errors.UnavailableError):
        wait_to_end_early(torn, is_saved=lambda: False)
