"""Checkpoints that cannot be loaded: damaged, deleted, unknown, or too large for the memory that is left."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from testkit.text_lifecycle import WAIT_SECONDS, TextLifecycle
from understudy.evaluator.evaluator_errors import (
    LoadError,
    OutOfResourcesError,
    VersionNotFoundError,
)
from understudy.evaluator.serving import loading
from understudy.evaluator.types import VersionState


def test_a_bad_checkpoint_is_quarantined_and_the_serving_version_stays(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1)
    lifecycle.promote(1)
    lifecycle.publish(2, text="nonsense")

    with pytest.raises(LoadError, match=r"model\.keras is not a model"):
        lifecycle.promote(2)

    info = lifecycle.store.info(2)
    failure = lifecycle.quarantine.failure(info.key)
    assert failure is not None
    assert (failure.attempts, failure.given_up) == (1, False)
    assert "is not a model" in lifecycle.status(2).error
    assert lifecycle.status(2).state is VersionState.END
    assert lifecycle.observer.outcomes == ["loaded", "failed"]
    with lifecycle.manager.borrow() as handle:
        assert handle.step == 1


def test_a_slot_in_which_loading_failed_is_used_again(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1, 3)
    lifecycle.publish(2, text="net torn")
    lifecycle.promote(1)
    for _ in range(4):
        with pytest.raises(LoadError):
            lifecycle.promote(2)

    lifecycle.promote(3)

    assert len(lifecycle.built) == 2


def test_everyone_who_waits_for_a_bad_checkpoint_is_told(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1)
    lifecycle.publish(2, text="net torn")
    lifecycle.may_load.clear()
    running = lifecycle.manager.promote(1)
    futures = [lifecycle.manager.acquire(2), lifecycle.manager.acquire(2)]
    lifecycle.may_load.set()

    running.result(WAIT_SECONDS).release()
    for future in futures:
        assert isinstance(future.exception(WAIT_SECONDS), LoadError)
    assert lifecycle.observer.outcomes == ["loaded", "failed"]


def test_a_checkpoint_deleted_before_it_is_read_is_given_up(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1)
    for file in lifecycle.run.checkpoint(1).iterdir():
        file.unlink()
    lifecycle.run.checkpoint(1).rmdir()

    with pytest.raises(LoadError, match="deleted before it could be fetched"):
        lifecycle.promote(1)


def test_when_memory_runs_out_a_on_demand_version_goes_then_the_predecessor_then_the_new_checkpoint(
    make_lifecycle: Callable[..., TextLifecycle],
) -> None:
    lifecycle = make_lifecycle(memory=2)
    lifecycle.manager.start()
    lifecycle.publish(1, 2, 3, 4)
    lifecycle.promote(1)
    lifecycle.promote(2)
    lifecycle.promote(3)
    assert lifecycle.loaded() == [2, 3]
    lifecycle.acquire(1).release()
    lifecycle.promote(4)
    assert lifecycle.loaded() == [3, 4]


def test_with_memory_for_one_the_new_checkpoint_waits_and_is_never_given_up(
    make_lifecycle: Callable[..., TextLifecycle],
) -> None:
    lifecycle = make_lifecycle(memory=1)
    lifecycle.manager.start()
    lifecycle.publish(1, 2)
    lifecycle.promote(1)
    key = next(info.key for info in lifecycle.store.checkpoints() if info.step == 2)

    for _ in range(5):
        with pytest.raises(OutOfResourcesError, match="step 2 is to be loaded later"):
            lifecycle.promote(2)
        assert not lifecycle.quarantine.admits(key)
        lifecycle.clock.now += 60
        assert lifecycle.quarantine.admits(key)
    failure = lifecycle.quarantine.failure(key)
    assert failure is not None
    assert (failure.attempts, failure.given_up, failure.postponed) == (0, False, 5)
    assert (lifecycle.loaded(), lifecycle.status(2).state) == ([1], VersionState.START)
    lifecycle.memory = 2
    lifecycle.promote(2)
    assert lifecycle.loaded() == [1, 2]
    assert lifecycle.observer.outcomes == ["loaded", *["postponed"] * 5, "loaded"]


def test_a_slot_that_has_no_memory_to_load_into_is_given_up_and_then_the_predecessors(
    make_lifecycle: Callable[..., TextLifecycle],
) -> None:
    lifecycle = make_lifecycle()
    lifecycle.manager.start()
    lifecycle.publish(1, 2, 3, 4)
    for step in (1, 2, 3):
        lifecycle.promote(step)
    lifecycle.out_of_memory_while_slots_exceed = 1

    lifecycle.promote(4)

    assert lifecycle.loaded() == [3, 4]
    assert lifecycle.observer.outcomes == ["loaded"] * 4
    assert lifecycle.reclaimed == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_what_the_machine_lacks_costs_a_checkpoint_no_attempt(lifecycle: TextLifecycle, number: int) -> None:
    lifecycle.publish(1, 2)
    lifecycle.promote(1)
    lifecycle.load_fails_with = OSError(number, os.strerror(number))
    for _ in range(5):
        with pytest.raises(OutOfResourcesError, match=os.strerror(number)):
            lifecycle.promote(2)
    lifecycle.load_fails_with = None

    lifecycle.promote(2)

    assert lifecycle.loaded() == [1, 2]
    assert "failed" not in lifecycle.observer.outcomes


def test_a_load_that_fails_because_its_folder_is_lost_meanwhile_costs_no_attempt(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1)
    lifecycle.may_load.clear()
    loading = lifecycle.manager.promote(1)
    assert lifecycle.is_loading.wait(WAIT_SECONDS)
    leases = lifecycle.run.leases
    away = leases.rename(leases.with_name("away"))
    lifecycle.load_fails_with = LoadError("model.keras is not a model")
    lifecycle.may_load.set()
    with pytest.raises(OutOfResourcesError, match="is not a model"):
        loading.result(WAIT_SECONDS)
    lifecycle.load_fails_with = None
    away.rename(leases)

    lifecycle.promote(1)

    assert lifecycle.observer.outcomes == ["postponed", "loaded"]


def test_an_unknown_step_is_refused_by_the_known_ones(lifecycle: TextLifecycle) -> None:
    lifecycle.publish(1, 2)

    with pytest.raises(VersionNotFoundError, match=r"no checkpoint of step 9; there are \[1, 2\]"):
        lifecycle.manager.acquire(9)


@pytest.mark.parametrize(("available", "is_warned_of"), [(3 * 2**20, False), (2**20, True)])
def test_a_model_larger_than_the_memory_is_warned_of_before_it_is_loaded(
    lifecycle: TextLifecycle,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    available: int,
    is_warned_of: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    monkeypatch.setattr(loading, "available_memory_bytes", lambda: available)
    lifecycle.publish(1, text="net 1".ljust(2 * 2**20))
    lifecycle.promote(1)
    warnings = [vars(record) for record in caplog.records if "larger than the memory" in record.message]
    assert [(each["step"], each["files_mib"], each["available_mib"]) for each in warnings] == [(1, 2, 1)] * is_warned_of
