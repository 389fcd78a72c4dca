"""When settings are looked for, and what ends it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from testkit.in_process import until
from understudy.evaluator.evaluator_errors import TrialError, VersionNotFoundError
from understudy.evaluator.tuning import self_tuner
from understudy.evaluator.tuning.choice import CallCost, FoundSettings, Measurement, Threads
from understudy.evaluator.tuning.self_tuner import MOST_ATTEMPTS, SelfTuner, TunedModel
from understudy.evaluator.tuning.trial import TrialRequest
from understudy.evaluator.tuning.tuning_file import Conditions, TuningFile

WAIT_SECONDS = 30.0
NEVER_SECONDS = 1000.0
CORES = 4
NONE_GIVEN = Threads()
CHECKPOINT: Any = "the leased checkpoint"


class ScriptedTrial:
    """Measures at once, or once `may_end` is set; one thread is twice as fast as any other number."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.began = threading.Event()
        self.asked: list[Threads] = []
        self.error: Exception | None = None
        self.busy_with: set[int | None] = set()

    def __call__(self, request: TrialRequest, is_wanted: Callable[[], bool]) -> Measurement | None:
        self.asked.append(request.threads)
        self.began.set()
        while not self.may_end.wait(0.001):
            if not is_wanted():
                return None
        if self.error is not None:
            raise self.error
        wall = 1e-3 if request.threads == Threads(intra_op=1) else 2e-3
        cost = CallCost(wall_seconds=wall, cpu_seconds=wall / (2 if request.threads.intra_op in self.busy_with else 1))
        return Measurement(threads=request.threads, calls={1: cost, 2: cost, 32: cost})


class Stand:
    """A tuner whose versions all have one architecture each."""

    def __init__(self, folder: Path) -> None:
        self.trial = ScriptedTrial()
        self.file = TuningFile(folder, Conditions(digest="here"))
        self.applied: list[FoundSettings] = []
        self.leases = 0
        self.deleted: set[int] = set()
        self.looked_at: set[int] = set()
        self.architectures: dict[int, str] = {}
        self.tuners: list[SelfTuner] = []

    def start(self, *, settling_seconds: float = 0.0, given: Threads = NONE_GIVEN, replicas: int = 1) -> SelfTuner:
        tuner = SelfTuner(
            file=self.file,
            serving=self.serving,
            apply=self.applied.append,
            request=self.request,
            given=given,
            in_effect=given,
            replicas=replicas,
            trial=self.trial,
            settling_seconds=settling_seconds,
        )
        tuner.start()
        self.tuners.append(tuner)
        return tuner

    def serving(self, step: int) -> TunedModel:
        self.looked_at.add(step)
        if step not in self.architectures:
            raise VersionNotFoundError(f"version {step} is not loaded")
        return TunedModel(architecture=self.architectures[step], lease=partial(self.lease, step))

    @contextmanager
    def lease(self, step: int) -> Iterator[Any]:
        if step in self.deleted:
            raise VersionNotFoundError(f"there is no checkpoint of step {step}")
        self.leases += 1
        try:
            yield CHECKPOINT
        finally:
            self.leases -= 1

    def request(self, checkpoint: Any, threads: Threads) -> TrialRequest:
        assert checkpoint is CHECKPOINT
        assert self.leases == 1
        return TrialRequest(
            model_file="",
            kind="keras",
            experiment=None,
            allow_unsafe_models=False,
            devices=(),
            logical_cpus=None,
            frozen_memory_mib=0,
            threads=threads,
        )


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    monkeypatch.setattr(self_tuner, "usable_cores", lambda: CORES)
    monkeypatch.setattr(self_tuner, "available_memory_bytes", lambda: 2**60)
    stand = Stand(tmp_path)
    yield stand
    for tuner in stand.tuners:
        tuner.close(WAIT_SECONDS)


def test_settings_of_a_new_model_are_found_applied_and_remembered(stand: Stand) -> None:
    stand.architectures[7] = "mlp"
    stand.start().promoted(7)

    until(lambda: bool(stand.applied))

    assert stand.trial.asked == [Threads(), *(Threads(intra_op=n) for n in (1, 2)), Threads(intra_op=1, inter_op=1)]
    assert stand.applied[0].threads == Threads(intra_op=1)
    assert stand.file.find("mlp") == stand.applied[0]
    assert stand.leases == 0


def test_a_restart_uses_what_was_found_at_once(stand: Stand) -> None:
    found = FoundSettings(max_batch_size=512)
    stand.file.remember("mlp", found)
    stand.file.remember("another", FoundSettings())
    stand.architectures[7] = "mlp"

    stand.start(settling_seconds=NEVER_SECONDS).promoted(7)

    until(lambda: stand.applied == [found])
    assert not stand.trial.asked
    assert stand.file.last() == found, "its threads are those of the next start"


def test_given_threads_are_not_changed(stand: Stand) -> None:
    stand.architectures[7] = "mlp"
    stand.start(given=Threads(intra_op=3, inter_op=3)).promoted(7)

    until(lambda: bool(stand.applied))

    assert stand.trial.asked == [Threads(intra_op=3, inter_op=3)]
    assert stand.applied[0].threads == Threads(intra_op=3, inter_op=3)


def test_several_replicas_keep_their_threads_for_operations_at_the_same_time(stand: Stand) -> None:
    stand.architectures[7] = "mlp"
    stand.start(replicas=2).promoted(7)

    until(lambda: bool(stand.applied))

    assert all(threads.inter_op is None for threads in stand.trial.asked)


def test_a_model_that_has_not_served_for_a_while_is_not_tried(stand: Stand) -> None:
    stand.architectures[7] = "mlp"
    tuner = stand.start(settling_seconds=NEVER_SECONDS)
    tuner.promoted(7)

    tuner.close(WAIT_SECONDS)

    assert not stand.trial.asked


def test_a_newer_checkpoint_of_the_same_model_does_not_end_a_trial(stand: Stand) -> None:
    stand.architectures |= {7: "mlp", 8: "mlp"}
    stand.trial.may_end.clear()
    tuner = stand.start()
    tuner.promoted(7)
    assert stand.trial.began.wait(WAIT_SECONDS)

    tuner.promoted(8)
    stand.trial.may_end.set()

    until(lambda: bool(stand.applied))
    assert stand.trial.asked.count(Threads()) == 1


def test_where_checkpoints_follow_quickly_the_newest_is_tried_as_the_first_may_be_deleted(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    stand.architectures |= {7: "mlp", 8: "mlp"}
    tuner = stand.start(settling_seconds=2.0)
    with caplog.at_level(logging.WARNING):
        tuner.promoted(7)
        until(lambda: 7 in stand.looked_at)
        stand.deleted.add(7)
        tuner.promoted(8)
        until(lambda: bool(stand.applied))

    assert not caplog.records


def test_another_model_ends_a_trial_and_is_tried_itself(stand: Stand) -> None:
    stand.architectures |= {7: "mlp", 8: "lstm"}
    stand.trial.may_end.clear()
    tuner = stand.start()
    tuner.promoted(7)
    assert stand.trial.began.wait(WAIT_SECONDS)

    tuner.promoted(8)
    until(lambda: len(stand.trial.asked) == 2)
    stand.trial.may_end.set()

    until(lambda: bool(stand.applied))
    assert stand.file.find("mlp") is None
    assert stand.file.find("lstm") is not None


def test_the_end_of_the_service_ends_a_trial(stand: Stand) -> None:
    stand.architectures[7] = "mlp"
    stand.trial.may_end.clear()
    tuner = stand.start()
    tuner.promoted(7)
    assert stand.trial.began.wait(WAIT_SECONDS)

    tuner.close(WAIT_SECONDS)

    assert not stand.applied
    assert stand.file.last() is None


def test_the_next_checkpoint_of_the_same_model_needs_no_trial(stand: Stand) -> None:
    stand.architectures |= {7: "mlp", 8: "mlp", 9: "lstm"}
    tuner = stand.start()
    tuner.promoted(7)
    until(lambda: len(stand.applied) == 1)
    trials = len(stand.trial.asked)

    tuner.promoted(8)
    tuner.promoted(9)

    until(lambda: len(stand.applied) == 2)
    assert len(stand.trial.asked) == 2 * trials


def test_a_model_that_is_served_again_has_its_own_settings_again(stand: Stand) -> None:
    stand.architectures |= {7: "mlp", 8: "lstm"}
    found = {"mlp": FoundSettings(max_batch_size=512), "lstm": FoundSettings(max_batch_size=64)}
    for architecture, settings in found.items():
        stand.file.remember(architecture, settings)
    tuner = stand.start()
    for number, step in enumerate((7, 8, 7), start=1):
        tuner.promoted(step)
        until(lambda number=number: len(stand.applied) == number)  # type: ignore[misc]

    assert stand.applied == [found["mlp"], found["lstm"], found["mlp"]]
    assert stand.file.last() == found["mlp"], "its threads are those of the next start"


def test_a_trial_that_fails_is_said_and_repeated_with_the_next_checkpoints_but_not_for_ever(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    stand.architectures = dict.fromkeys(range(MOST_ATTEMPTS + 2), "mlp")
    stand.trial.error = TrialError("the trial failed: no reason")
    tuner = stand.start()
    with caplog.at_level(logging.WARNING):
        for step in range(MOST_ATTEMPTS):
            tuner.promoted(step)
            until(lambda attempts=step + 1: len(stand.trial.asked) == attempts)  # type: ignore[misc]
        tuner.promoted(MOST_ATTEMPTS)
        tuner.close(WAIT_SECONDS)

    assert len(stand.trial.asked) == MOST_ATTEMPTS
    assert [record.reason for record in caplog.records] == ["the trial failed: no reason"] * MOST_ATTEMPTS  # type: ignore[attr-defined]
    assert not stand.applied


@pytest.mark.parametrize("busy_with", [{None, 1, 2}, {None}, {1}])
def test_what_a_busy_machine_measures_is_not_used(
    stand: Stand, caplog: pytest.LogCaptureFixture, busy_with: set[int | None]
) -> None:
    stand.architectures[7] = "mlp"
    stand.trial.busy_with = busy_with
    tuner = stand.start()
    with caplog.at_level(logging.WARNING):
        tuner.promoted(7)
        until(lambda: bool(caplog.records))

    assert not stand.applied
    assert stand.file.last() is None


def test_a_machine_without_spare_memory_gets_no_trial(
    stand: Stand, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_tuner, "available_memory_bytes", lambda: 2**20)
    stand.architectures[7] = "mlp"
    tuner = stand.start()
    with caplog.at_level(logging.WARNING):
        tuner.promoted(7)
        until(lambda: bool(caplog.records))

    assert "1 MiB of memory are available" in caplog.records[0].reason  # type: ignore[attr-defined]
    assert not stand.trial.asked
