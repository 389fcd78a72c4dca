"""What an evaluator tells the servers that follow it."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from understudy.evaluator.serving import decision_file
from understudy.evaluator.serving.decision_file import (
    DECISION_FILE,
    Canary,
    DecisionFile,
    FollowedDecision,
    ServingDecision,
)
from understudy.evaluator.succession import REPLACED_FILE

WAIT_SECONDS = 60.0
FIRST = (10, "a" * 64)
SECOND = (20, "b" * 64)


def publish(written: DecisionFile, decision: tuple[int, str]) -> None:
    written.publish(lambda: decision, followed=None)


def key(decision: ServingDecision | None) -> tuple[int, str] | None:
    return None if decision is None else decision.key


def test_a_decision_is_read_as_it_was_written(tmp_path: Path) -> None:
    followed = FollowedDecision(tmp_path)
    assert followed.current is None
    written = DecisionFile(tmp_path)
    for decision in (FIRST, SECOND, FIRST):
        publish(written, decision)
        assert followed.refresh()
        assert not followed.refresh()
        assert key(followed.current) == decision
    assert key(FollowedDecision(tmp_path).current) == FIRST


def test_a_decision_that_is_repeated_is_not_written_again(tmp_path: Path) -> None:
    written = DecisionFile(tmp_path)
    publish(written, FIRST)
    (tmp_path / DECISION_FILE).unlink()
    publish(written, FIRST)
    assert not (tmp_path / DECISION_FILE).exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"step": "ten"}', b'{"step": 10}', b"\xff\xfe"])
def test_what_is_no_decision_changes_nothing_and_is_told_once(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(DecisionFile(tmp_path), FIRST)
    followed = FollowedDecision(tmp_path)
    (tmp_path / DECISION_FILE).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert not followed.refresh()
        assert not followed.refresh()
    assert key(followed.current) == FIRST
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "cannot read the decision of the evaluator to follow"
    ]
    publish(DecisionFile(tmp_path), SECOND)
    assert followed.refresh()


def test_a_decision_outlives_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "evaluator"
    folder.mkdir()
    publish(DecisionFile(folder), FIRST)
    followed = FollowedDecision(folder)
    (folder / DECISION_FILE).unlink()
    folder.rmdir()
    assert not followed.refresh()
    assert key(followed.current) == FIRST


def test_an_evaluator_that_has_lost_its_state_is_followed_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the evaluator of this run all the same, as it has the folder."""
    publish(DecisionFile(tmp_path), FIRST)
    followed = FollowedDecision(tmp_path)
    (tmp_path / DECISION_FILE).unlink()
    publish(DecisionFile(tmp_path), SECOND)
    with caplog.at_level(logging.WARNING):
        assert followed.refresh()
    assert key(followed.current) == SECOND
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "the evaluator to follow has lost its state"
    ]


def test_a_decision_that_could_not_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = DecisionFile(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(decision_file, "write_json", full)
        publish(written, FIRST)
        publish(written, FIRST)
    assert len(caplog.records) == 1
    publish(written, FIRST)
    found = json.loads((tmp_path / DECISION_FILE).read_text())
    assert (found["step"], found["digest"], found["sequence"]) == (*FIRST, 1)


def test_decisions_are_numbered_through_restarts_and_told_in_order(tmp_path: Path) -> None:
    told: list[ServingDecision] = []
    for decisions in ((FIRST, SECOND), (SECOND, FIRST)):
        written = DecisionFile(tmp_path)
        written.listen(told.append)
        for decision in decisions:
            publish(written, decision)
    assert [(each.sequence, each.key) for each in told] == [(1, FIRST), (2, SECOND), (2, SECOND), (3, FIRST)]
    assert len({each.evaluator_id for each in told}) == 1
    last = DecisionFile(tmp_path).current
    assert last == told[-1]


def test_a_server_that_follows_passes_on_the_decision_that_it_has_carried_out(tmp_path: Path) -> None:
    """So those that follow it may follow the evaluator as well."""
    (tmp_path / "server").mkdir()
    decided, passed_on = DecisionFile(tmp_path), DecisionFile(tmp_path / "server")
    publish(decided, FIRST)
    followed = FollowedDecision(tmp_path)
    passed_on.publish(lambda: FIRST, followed=followed)
    assert passed_on.current == decided.current
    first = decided.current
    publish(decided, SECOND)
    assert followed.refresh()
    passed_on.publish(lambda: FIRST, followed=followed)
    assert passed_on.current == first
    passed_on.publish(lambda: SECOND, followed=followed)
    assert passed_on.current == decided.current != first
    decided.set_trial(Canary(step=30, digest="c" * 64, servers=("one",)))
    assert followed.refresh()
    passed_on.publish(lambda: SECOND, followed=followed)
    assert passed_on.current is not None
    assert (passed_on.current.sequence, passed_on.current.canary) == (3, None)
    assert DecisionFile(tmp_path / "server").current == passed_on.current


def test_a_decision_of_an_earlier_version_gets_a_number_when_it_is_taken_again(tmp_path: Path) -> None:
    (tmp_path / DECISION_FILE).write_text(json.dumps({"step": FIRST[0], "digest": FIRST[1]}))
    written = DecisionFile(tmp_path)
    publish(written, FIRST)
    assert written.current is not None
    assert (written.current.key, written.current.sequence) == (FIRST, 1)
    assert written.current.evaluator_id


def test_of_two_threads_that_tell_of_a_change_the_later_one_stands(tmp_path: Path) -> None:
    """Each reads what is serving; the slower one must not tell of what was serving before."""
    written = DecisionFile(tmp_path)
    serving, reads, go_on = [FIRST], threading.Event(), threading.Event()

    def read_slowly() -> tuple[int, str]:
        found = serving[0]
        reads.set()
        assert go_on.wait(WAIT_SECONDS)
        return found

    slow = threading.Thread(target=written.publish, args=(read_slowly,), kwargs={"followed": None})
    slow.start()
    assert reads.wait(WAIT_SECONDS)
    serving[0] = SECOND
    fast = threading.Thread(target=written.publish, args=(lambda: serving[0],), kwargs={"followed": None})
    fast.start()
    go_on.set()
    slow.join(WAIT_SECONDS)
    fast.join(WAIT_SECONDS)
    assert key(written.current) == SECOND


def test_nothing_is_told_before_something_serves(tmp_path: Path) -> None:
    written = DecisionFile(tmp_path)
    written.publish(lambda: None, followed=None)
    assert written.current is None


def test_an_evaluator_replaces_the_one_whose_state_folder_was_at_the_path_of_its_own(tmp_path: Path) -> None:
    state = tmp_path / "run" / "evaluator"
    state.mkdir(parents=True)
    identities: list[str] = []
    for generation in range(3):
        written = DecisionFile(state)
        publish(written, FIRST)
        assert written.current is not None
        assert written.current.replaces == tuple(identities)
        assert DecisionFile(state).current == written.current
        identities.insert(0, written.current.evaluator_id)
        (tmp_path / "run").rename(tmp_path / f"away {generation}")
        written.hand_over()
    assert len(set(identities)) == 3


def test_an_operator_says_once_which_evaluator_another_one_replaces(tmp_path: Path) -> None:
    publish(DecisionFile(tmp_path), FIRST)
    told: list[ServingDecision] = []
    written = DecisionFile(tmp_path, replaces="a" * 32)
    written.listen(told.append)
    publish(written, FIRST)
    assert [(decision.sequence, decision.replaces) for decision in told] == [(1, ()), (2, ("a" * 32,))]
    again = DecisionFile(tmp_path)
    publish(again, SECOND)
    assert again.current is not None
    assert again.current.replaces == ("a" * 32,)


@pytest.mark.parametrize("content", [b"", b"{", b"5", b'{"a": 1}', b'["..", 3, "A"]', b"\xff"])
def test_what_names_no_replaced_evaluator_replaces_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / REPLACED_FILE).write_bytes(content)
    written = DecisionFile(tmp_path)
    publish(written, FIRST)
    assert written.current is not None
    assert written.current.replaces == ()


def test_a_state_folder_that_cannot_be_made_again_ends_without_a_successor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "run" / "evaluator"
    written = DecisionFile(state)
    (tmp_path / "run").write_text("a file")
    written.hand_over()
    assert "servers that follow one of them stay with it" in caplog.text
