from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from understudy.evaluator.records import life_log
from understudy.evaluator.records.life_log import LifeLog
from understudy.evaluator.types import CheckpointInfo, LifeEvent

COMMITTED_AT = 90.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def info(step: int, digest: str = "d") -> CheckpointInfo:
    return CheckpointInfo(step=step, created_at=COMMITTED_AT, digest=digest, final=False)


def events(log: LifeLog, step: int) -> list[tuple[str, float]]:
    return [(record.event.value, record.at) for record in log.of_step(step)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "life.sqlite"


@pytest.fixture
def log(file: Path) -> Iterator[LifeLog]:
    opened = LifeLog(file, clock=Clock())
    yield opened
    opened.close()


def test_a_life_is_told_in_order_and_survives_a_restart(log: LifeLog, file: Path) -> None:
    log.record_seen([info(10), info(20)])
    log.record(info(10), LifeEvent.VERIFIED)
    log.record(info(10), LifeEvent.SERVED)
    log.record(info(20), LifeEvent.SERVED)
    log.record(info(10), LifeEvent.REPLACED)
    log.close()

    again = LifeLog(file, clock=Clock())
    assert events(again, 10) == [
        ("committed", 90.0),
        ("seen", 101.0),
        ("verified", 102.0),
        ("served", 103.0),
        ("replaced", 105.0),
    ]
    again.record_seen([info(10)])
    again.record(info(10), LifeEvent.SERVED)
    assert [event for event, _ in events(again, 10)].count("seen") == 1
    assert [event for event, _ in events(again, 10)].count("served") == 2
    assert again.of_step(30) == []
    again.close()


def test_other_content_of_a_step_has_a_life_of_its_own(log: LifeLog) -> None:
    log.record_seen([info(10, "old")])
    log.record_seen([info(10, "new")])

    assert {(record.checkpoint_digest, record.event.value) for record in log.of_step(10)} == {
        (digest, event) for digest in ("old", "new") for event in ("committed", "seen")
    }


def test_the_steps_that_served_are_told_in_their_order(log: LifeLog) -> None:
    for step in (10, 20, 10, 30):
        log.record(info(step), LifeEvent.LOADED)
        log.record(info(step), LifeEvent.SERVED)

    assert log.served_steps(9) == [10, 20, 10, 30]
    assert log.served_steps(2) == [10, 30]


def test_only_the_newest_records_are_kept(log: LifeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_log, "MAX_RECORDS", 3)
    for step in range(5):
        log.record(info(step), LifeEvent.LOADED)

    assert [step for step in range(5) if log.of_step(step)] == [2, 3, 4]


def test_a_damaged_file_is_moved_aside_and_a_new_one_begun(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_bytes(b"not a database" * 100)
    log = LifeLog(file)
    log.record(info(10), LifeEvent.LOADED)

    assert len(log.of_step(10)) == 1
    assert file.with_name("life.sqlite.damaged").read_bytes().startswith(b"not a database")
    assert "cannot be read" in caplog.text
    log.close()


def test_a_file_that_cannot_be_used_is_logged_once_and_stops_nothing(
    file: Path, log: LifeLog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life_log, "_BUSY_SECONDS", 0.01)
    log.record(info(10), LifeEvent.SEEN)
    with caplog.at_level(logging.WARNING):
        second = LifeLog(file)
        for _ in range(3):
            second.record(info(10), LifeEvent.LOADED)
    assert caplog.text.count("not recorded") == 1
    assert second.of_step(10) == []

    log.close()
    second.record(info(10), LifeEvent.WARMED_UP)
    assert [event for event, _ in events(second, 10)] == ["seen", "warmed up"]
    second.close()
    second.record(info(10), LifeEvent.SERVED)
    assert second.of_step(10) == []
