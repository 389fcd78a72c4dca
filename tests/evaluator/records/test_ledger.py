from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.records.entries import decode_details, encode_details, encode_resampled
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord, GateCondition, Interval, SliceScore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    ledger = Ledger(path, clock=lambda: 1234.5)
    yield ledger
    ledger.close()


def append(ledger: Ledger, step: int, **fields: Any) -> EvaluationRecord:
    defaults: dict[str, Any] = {
        "checkpoint_digest": f"d{step}",
        "dataset": "test",
        "outcome": EvaluationOutcome.SCORED,
        "metrics": {"loss": 1 / step},
    }
    ways = {name: fields.pop(name) for name in ("scoring_digest", "resampled") if name in fields}
    return ledger.append(EvaluationRecord(step=step, **(defaults | fields)), **ways)


def test_an_entry_is_read_back_as_it_was_written(ledger: Ledger) -> None:
    written = append(ledger, 3, examples=7, duration_seconds=0.5, notes=["one replica"], reason="")

    assert ledger.page() == [written]
    assert written == EvaluationRecord(
        sequence=1,
        step=3,
        checkpoint_digest="d3",
        dataset="test",
        outcome=EvaluationOutcome.SCORED,
        metrics={"loss": 1 / 3},
        examples=7,
        duration_seconds=0.5,
        recorded_at=1234.5,
        notes=("one replica",),
    )


DETAILS: dict[str, Any] = {
    "intervals": {"loss": Interval(low=0.1, high=math.inf)},
    "slices": (
        SliceScore(
            name="label=3",
            examples=5,
            metrics={"loss": 0.3},
            intervals={"loss": Interval(low=0.2, high=0.4)},
            undefined={"auc": "one class"},
        ),
        SliceScore(name="age=[18,30)", examples=1, notes=("fewer than 5 examples",)),
    ),
    "resamples": 3,
    "confidence": 0.9,
    "metric_digest": "m",
    "metric_digests": {"loss": "l"},
    "undefined": {"auc": "one class"},
    "conditions": (
        GateCondition(text="test/loss <= 1", outcome=EvaluationOutcome.ACCEPTED, value=0.3, reason="it is"),
        GateCondition(
            text="test/loss not worse by 0.1 at 90%",
            outcome=EvaluationOutcome.UNDECIDED,
            value=0.3,
            baseline_step=2,
            baseline_value=0.4,
            interval=Interval(low=-0.3, high=0.2),
        ),
    ),
}


def test_slices_intervals_and_conditions_are_read_back_as_they_were_written(path: Path, ledger: Ledger) -> None:
    resampled = {"loss": np.array([1, math.nan, 3], np.float32), "loss[label=3]": np.array([4, 5, 6], np.float32)}
    written = append(ledger, 3, dataset_digest="content", resampled=resampled, **DETAILS)
    plain = append(ledger, 4)
    ledger.close()

    ledger = Ledger(path)
    assert ledger.page() == [written, plain]
    assert {name: getattr(written, name) for name in DETAILS} == DETAILS
    assert written.dataset_digest == "content"
    kept = ledger.resampled(written.sequence)
    assert list(kept) == list(resampled)
    for name, values in resampled.items():
        np.testing.assert_array_equal(kept[name], values)
    assert not ledger.resampled(plain.sequence)

    append(ledger, 5)
    assert ledger.remove_oldest(keep=1, protected=()) == 2
    assert not ledger.resampled(written.sequence)
    ledger.close()


def test_details_of_older_entries_are_read(ledger: Ledger) -> None:
    details = json.loads(encode_details(append(ledger, 3, **DETAILS)))
    for each in (details, *details["slices"]):
        del each["undefined"]
    del details["metric_digests"]
    plain = replace(DETAILS["slices"][0], undefined={})
    older = {**DETAILS, "metric_digests": {}, "undefined": {}, "slices": (plain, *DETAILS["slices"][1:])}
    assert decode_details(json.dumps(details)) == older


def test_another_way_of_scoring_is_other_work(ledger: Ledger) -> None:
    before = append(ledger, 1)
    after = append(ledger, 1, scoring_digest="with slices")

    assert ledger.page() == [before, after]
    assert ledger.find(step=1, checkpoint_digest="d1", dataset="test") == after


_VERSION_1 = """
CREATE TABLE evaluations (
    sequence INTEGER PRIMARY KEY, step INTEGER NOT NULL, checkpoint_digest TEXT NOT NULL, dataset TEXT NOT NULL,
    dataset_digest TEXT NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL, metrics TEXT NOT NULL,
    examples INTEGER NOT NULL, duration_seconds REAL NOT NULL, recorded_at REAL NOT NULL, notes TEXT NOT NULL,
    UNIQUE (checkpoint_digest, step, dataset, dataset_digest, outcome)
) STRICT;
CREATE INDEX evaluations_by_step ON evaluations (step);
PRAGMA application_id = 1431524441; PRAGMA user_version = 1;
"""


_VERSION_2 = """
CREATE TABLE evaluations (
    sequence INTEGER PRIMARY KEY, step INTEGER NOT NULL, checkpoint_digest TEXT NOT NULL, dataset TEXT NOT NULL,
    dataset_digest TEXT NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL, metrics TEXT NOT NULL,
    examples INTEGER NOT NULL, duration_seconds REAL NOT NULL, recorded_at REAL NOT NULL, notes TEXT NOT NULL,
    details TEXT NOT NULL DEFAULT '{}', scoring_digest TEXT NOT NULL DEFAULT '',
    UNIQUE (checkpoint_digest, step, dataset, dataset_digest, outcome, scoring_digest)
) STRICT;
CREATE INDEX evaluations_by_step ON evaluations (step);
CREATE TABLE resampled (sequence INTEGER PRIMARY KEY, content BLOB NOT NULL) STRICT;
PRAGMA application_id = 1431524441; PRAGMA user_version = 2;
"""


@pytest.mark.parametrize(("version", "schema"), [(1, _VERSION_1), (2, _VERSION_2)])
def test_a_ledger_of_an_older_version_has_the_tables_of_a_new_one_once_it_is_opened(
    path: Path, version: int, schema: str
) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(schema)
        assert connection.execute("PRAGMA user_version").fetchone() == (version,)
    Ledger(path).close()
    new = path.with_name("new.sqlite")
    Ledger(new).close()

    def tables(file: Path) -> set[tuple[str, str]]:
        with contextlib.closing(sqlite3.connect(file)) as connection:
            assert connection.execute("PRAGMA user_version").fetchone() == (4,)
            rows = connection.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
        return {(name, "".join(sql.replace('"', "").split())) for name, sql in rows}

    assert tables(path) == tables(new)


def test_a_ledger_of_version_2_keeps_every_entry_and_its_resamples(path: Path) -> None:
    resampled = {"loss": np.array([1, 2], np.float32)}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(_VERSION_2)
        row = (7, 3, "d3", "test", "c", "scored", "", '{"loss": "0.1"}', 9, 0.5, 2.5, "[]", "{}", "way")
        connection.execute("INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        connection.execute("INSERT INTO resampled VALUES (?, ?)", (7, encode_resampled(resampled)))
        connection.commit()

    for _ in range(2):
        ledger = Ledger(path)
        (record,) = ledger.page()
        assert (record.sequence, record.metrics, record.recorded_at) == (7, {"loss": 0.1}, 2.5)
        np.testing.assert_array_equal(ledger.resampled(7)["loss"], resampled["loss"])
        ledger.close()


@pytest.mark.parametrize("file_system", ["ext4", "nfs4"])
def test_a_ledger_of_version_1_keeps_every_entry(path: Path, file_system: str) -> None:
    rows = [
        (7, 3, "d3", "test", "c", "scored", "", '{"loss": "0.1"}', 9, 0.5, 2.5, '["one replica"]'),
        (9, 4, "d4", "", "superseded-9", "failed", "no memory", "{}", 0, 0.0, 3.5, "[]"),
    ]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(_VERSION_1)
        connection.executemany("INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        connection.commit()

    for _ in range(2):
        ledger = Ledger(path, file_system_of=lambda _: file_system)
        first, second = ledger.page()
        assert first == EvaluationRecord(
            sequence=7,
            step=3,
            checkpoint_digest="d3",
            dataset="test",
            outcome=EvaluationOutcome.SCORED,
            metrics={"loss": 0.1},
            examples=9,
            duration_seconds=0.5,
            recorded_at=2.5,
            notes=("one replica",),
            dataset_digest="c",
        )
        assert (second.sequence, second.reason, second.dataset_digest) == (9, "no memory", "")
        assert ledger.find(step=3, checkpoint_digest="d3", dataset="test", dataset_digest="c") == first
        assert ledger.find(step=4, checkpoint_digest="d4", dataset="") is None
        ledger.close()
    ledger = Ledger(path, file_system_of=lambda _: file_system)
    assert append(ledger, 5, resampled={"loss": np.zeros(2, np.float32)}, **DETAILS).sequence == 10
    ledger.close()


@pytest.mark.parametrize(
    "reason",
    [
        "the model of step 3 differs from the serving version in its architecture or compile configuration; ...",
        "the devices have no memory left for step 3 beside what is serving",
        "the variables of model.weights.h5 are not those of the experiment's model: dense: shapes differ",
    ],
)
def test_a_failure_that_lay_in_the_evaluator_stays_on_record_but_settles_nothing_once_it_is_opened_again(
    path: Path, reason: str
) -> None:
    for time in (1, 2):
        ledger = Ledger(path)
        assert ledger.find(step=3, checkpoint_digest="d3", dataset="") is None
        append(ledger, 3, dataset="", outcome=EvaluationOutcome.FAILED, reason=reason)
        append(ledger, 4, dataset="", outcome=EvaluationOutcome.FAILED, reason="it is damaged")
        assert ledger.find(step=3, checkpoint_digest="d3", dataset="") is not None
        assert [record.step for record in ledger.page()].count(3) == time
        ledger.close()

    ledger = Ledger(path)
    assert ledger.find(step=4, checkpoint_digest="d4", dataset="") is not None
    assert [record.reason for record in ledger.of_step(3)] == [reason, reason]
    ledger.close()


def test_the_curves_of_scores_stay_apart_when_the_first_ones_are_removed(path: Path) -> None:
    configured = {"dataset_digest": "a" * 64, "metric_digests": {"top": "3" * 64}, "metrics": {"loss": 0.5, "top": 0.5}}
    ledger = Ledger(path)
    append(ledger, 1, **configured)
    append(ledger, 2, **{**configured, "metric_digests": {"top": "5" * 64}})
    append(ledger, 3, **{**configured, "dataset_digest": "b" * 64})
    assert ledger.remove_oldest(keep=2, protected=()) == 1
    ledger.close()

    again = Ledger(path)
    second, third = again.page()
    assert again.curves.names(second) == {"loss": "test", "top": "test-55555555"}
    assert again.curves.names(third) == {"loss": "test-bbbbbbbb", "top": "test-bbbbbbbb"}
    again.close()


def test_a_ledger_of_version_3_knows_which_scores_were_first(path: Path) -> None:
    ledger = Ledger(path)
    for step, digest in ((1, "3" * 64), (2, "5" * 64)):
        append(ledger, step, metrics={"top": 0.5}, metric_digests={"top": digest})
    append(ledger, 1, outcome=EvaluationOutcome.REFUSED, dataset="other", dataset_digest="c")
    ledger.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        known = connection.execute("SELECT * FROM first_scores").fetchall()
        connection.executescript("DROP TABLE first_scores; PRAGMA user_version = 3;")

    again = Ledger(path)
    assert [again.curves.names(record) for record in again.page(dataset="test")] == [
        {"top": "test"},
        {"top": "test-55555555"},
    ]
    again.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT * FROM first_scores").fetchall() == known


def test_nan_and_infinity_survive(ledger: Ledger) -> None:
    append(ledger, 1, metrics={"a": math.nan, "b": math.inf, "c": -math.inf})

    (record,) = ledger.page()

    assert math.isnan(record.metrics["a"])
    assert (record.metrics["b"], record.metrics["c"]) == (math.inf, -math.inf)


def test_the_same_work_is_recorded_once(ledger: Ledger) -> None:
    first = append(ledger, 1)
    again = append(ledger, 1, metrics={"loss": 9.0})

    assert again == first
    assert ledger.page() == [first]
    assert append(ledger, 2).sequence == 2


def test_another_content_of_the_dataset_is_other_work(ledger: Ledger) -> None:
    append(ledger, 1, dataset_digest="old")
    append(ledger, 1, dataset_digest="new")

    assert len(ledger.page()) == 2
    assert ledger.find(step=1, checkpoint_digest="d1", dataset="test", dataset_digest="none") is None


def test_pages_follow_one_another_and_pass_filters(ledger: Ledger) -> None:
    for step in range(1, 6):
        append(ledger, step)
        append(ledger, step, dataset="other", outcome=EvaluationOutcome.FAILED, reason="broken")

    first = ledger.page(limit=4)
    second = ledger.page(after_sequence=first[-1].sequence, limit=100)

    assert [record.sequence for record in (*first, *second)] == list(range(1, 11))
    assert [record.step for record in ledger.page(dataset="test", min_step=2, max_step=4)] == [2, 3, 4]
    assert {record.dataset for record in ledger.page(outcome=EvaluationOutcome.FAILED)} == {"other"}


def test_entries_survive_closing(path: Path, ledger: Ledger) -> None:
    append(ledger, 1)
    ledger.close()
    reopened = Ledger(path)

    assert [record.step for record in reopened.page()] == [1]
    assert append(reopened, 2).sequence == 2
    reopened.close()


def test_a_ledger_of_another_version_is_refused_by_name(path: Path) -> None:
    Ledger(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()

    with pytest.raises(LedgerError, match=r"ledger\.sqlite has schema version 99, this program reads up to 4"):
        Ledger(path)


def test_another_programs_database_is_refused_and_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = path.read_bytes()

    with pytest.raises(LedgerError, match="is not a ledger of evaluations"):
        Ledger(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused_by_name(path: Path) -> None:
    path.write_bytes(b"not a database " * 100)

    with pytest.raises(LedgerError, match=r"ledger\.sqlite cannot be used"):
        Ledger(path)


@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_is_written_while_another_file_or_none_is_where_the_ledger_was(
    path: Path, ledger: Ledger, *, replaced: bool
) -> None:
    append(ledger, 1)
    away = path.parent.rename(path.parent.with_name("away"))
    if replaced:
        path.parent.mkdir()
        Ledger(path).close()
    with pytest.raises(LedgerError, match="was deleted, moved or replaced while it was in use"):
        append(ledger, 2)
    assert [entry.step for entry in ledger.page()] == [1]
    shutil.rmtree(path.parent, ignore_errors=True)
    away.rename(path.parent)
    append(ledger, 2)
    assert [entry.step for entry in ledger.page()] == [1, 2]


def test_a_full_disk_loses_nothing(ledger: Ledger) -> None:
    append(ledger, 1)
    (pages,) = ledger._connection.execute("PRAGMA page_count").fetchone()
    ledger._connection.execute(f"PRAGMA max_page_count = {pages}")

    with pytest.raises(LedgerError, match="full"):
        append(ledger, 2, reason="x" * 100_000)

    assert [record.step for record in ledger.page()] == [1]
    ledger._connection.execute("PRAGMA max_page_count = 1000000")
    assert append(ledger, 2).sequence == 2


def journal_mode(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("PRAGMA journal_mode").fetchone()[0])


def test_a_ledger_on_a_local_disk_has_a_write_ahead_log(path: Path, ledger: Ledger) -> None:
    append(ledger, 1)

    assert journal_mode(path) == "wal"
    assert path.with_name("ledger.sqlite-wal").exists()


def test_a_ledger_on_nfs_has_a_rollback_journal_and_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    ledger = Ledger(path, file_system_of=lambda _: "nfs4")
    written = [append(ledger, step) for step in (1, 2)]

    assert ledger.page() == written
    assert journal_mode(path) == "delete"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert f"the ledger {path} is on a network file system (nfs4), so it has a rollback journal" in caplog.text
    ledger.close()


def test_a_ledger_that_moves_to_nfs_loses_its_write_ahead_log_and_no_entry(path: Path) -> None:
    local = Ledger(path)
    written = append(local, 1)
    moved = path.parent / "nfs" / path.name
    moved.parent.mkdir()
    for name in ("ledger.sqlite", "ledger.sqlite-wal"):  # while it is open, as a process that was killed leaves it
        shutil.copy(path.with_name(name), moved.parent)
    local.close()

    remote = Ledger(moved, file_system_of=lambda _: "nfs")
    assert remote.page() == [written]
    assert journal_mode(moved) == "delete"
    assert [file.name for file in moved.parent.iterdir()] == [moved.name]
    remote.close()


def test_an_entry_on_nfs_survives_a_kill_of_its_writer(path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from understudy.evaluator.records.ledger import Ledger; "
        "from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord\n"
        "ledger = Ledger(Path(sys.argv[1]), file_system_of=lambda _: 'nfs')\n"
        "entry = EvaluationRecord(step=5, checkpoint_digest='d', dataset='t', outcome=EvaluationOutcome.SCORED)\n"
        "ledger.append(entry)\n"
        "os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL

    reopened = Ledger(path, file_system_of=lambda _: "nfs")
    assert [record.step for record in reopened.page()] == [5]
    reopened.close()


def test_the_oldest_entries_are_removed_but_not_those_of_protected_steps(ledger: Ledger) -> None:
    for step in range(1, 21):
        append(ledger, step)
    page = ledger.page(limit=4)
    assert ledger.remove_oldest(keep=5, protected={3, 8}) == 13

    assert [entry.step for entry in ledger.page()] == [3, 8, 16, 17, 18, 19, 20]
    following = ledger.page(after_sequence=page[-1].sequence, limit=3)
    assert [entry.step for entry in following] == [8, 16, 17]
    assert ledger.remove_oldest(keep=5, protected={3, 8}) == 0
    assert append(ledger, 21).sequence == 21
    assert ledger.remove_oldest(keep=100, protected=()) == 0


def test_sequence_numbers_are_not_used_again_after_a_removal(path: Path, ledger: Ledger) -> None:
    for step in range(1, 4):
        append(ledger, step)
    assert ledger.remove_oldest(keep=1, protected=()) == 2
    ledger.close()
    again = Ledger(path)
    assert (again.last_sequence, append(again, 4).sequence) == (3, 4)
    again.close()


def test_entries_are_written_and_read_while_old_ones_are_removed(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.evaluator.records.ledger._PIECE", 5)
    for step in range(1, 201):
        append(ledger, step)
    removed: list[int] = []
    remover = threading.Thread(target=lambda: removed.append(ledger.remove_oldest(keep=10, protected={1})))
    remover.start()
    steps = [append(ledger, step).step for step in range(201, 231)]
    seen = [entry.step for entry in ledger.page(after_sequence=200)]
    remover.join(60)
    assert not remover.is_alive()
    assert steps == seen == list(range(201, 231))
    assert removed == [230 - len(ledger.page(limit=1000))]
    assert ledger.page(limit=1)[0].step == 1
