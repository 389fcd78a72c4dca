"""What an evaluator tells the servers that follow it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from understudy.evaluator.serving import decision_file
from understudy.evaluator.serving.decision_file import (
    DECISION_FILE,
    DecisionFile,
    FollowedDecision,
    ServingDecision,
)

FIRST = ServingDecision(step=10, digest="a" * 64)
SECOND = ServingDecision(step=20, digest="b" * 64)


def test_a_decision_is_read_as_it_was_written(tmp_path: Path) -> None:
    followed = FollowedDecision(tmp_path)
    assert followed.current is None
    written = DecisionFile(tmp_path)
    for decision in (FIRST, SECOND, FIRST):
        written.publish(decision)
        assert followed.refresh()
        assert not followed.refresh()
        assert followed.current == decision
    assert FollowedDecision(tmp_path).current == FIRST


def test_a_decision_that_is_repeated_is_not_written_again(tmp_path: Path) -> None:
    written = DecisionFile(tmp_path)
    written.publish(FIRST)
    (tmp_path / DECISION_FILE).unlink()
    written.publish(FIRST)
    assert not (tmp_path / DECISION_FILE).exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"step": "ten"}', b'{"step": 10}', b"\xff\xfe"])
def test_what_is_no_decision_changes_nothing_and_is_told_once(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DecisionFile(tmp_path).publish(FIRST)
    followed = FollowedDecision(tmp_path)
    (tmp_path / DECISION_FILE).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert not followed.refresh()
        assert not followed.refresh()
    assert followed.current == FIRST
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "cannot read the decision of the evaluator to follow"
    ]
    DecisionFile(tmp_path).publish(SECOND)
    assert followed.refresh()


def test_a_decision_outlives_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "evaluator"
    folder.mkdir()
    DecisionFile(folder).publish(FIRST)
    followed = FollowedDecision(folder)
    (folder / DECISION_FILE).unlink()
    folder.rmdir()
    assert not followed.refresh()
    assert followed.current == FIRST


def test_a_decision_that_could_not_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = DecisionFile(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(decision_file, "write_json", full)
        written.publish(FIRST)
        written.publish(FIRST)
    assert len(caplog.records) == 1
    written.publish(FIRST)
    assert json.loads((tmp_path / DECISION_FILE).read_text()) == {"step": 10, "digest": FIRST.digest}
