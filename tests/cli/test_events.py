"""The commands that show, resend and drop events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from understudy.cli.main import main
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.ledger_file import LEDGER_FILE
from understudy.evaluator.records.outbox import DeliveryCounts, Outbox, Subscription
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    """An outbox that is in use, as beside a running server, with two dead letters of ``a``."""
    path = tmp_path / LEDGER_FILE
    outbox = Outbox(path, [Subscription(destination="a"), Subscription(destination="b")])
    ledger = Ledger(path, outbox=outbox)
    for step in (1, 2, 3):
        ledger.append(
            EvaluationRecord(
                step=step,
                checkpoint_digest=f"d{step}",
                dataset="[bold]test[/bold]",
                outcome=EvaluationOutcome.SCORED,
                metrics={"loss": float("nan")},
            )
        )
    for _ in range(2):
        delivery = outbox.next("a")
        assert delivery is not None
        outbox.failed(delivery, "status 500", retry_after_seconds=None)
    yield outbox
    outbox.close()
    ledger.close()


def events(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["events", arguments[0], "--state-dir", str(folder), *arguments[1:]])


def listed(folder: Path, *arguments: str) -> Any:
    result = events(folder, "list", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_what_is_not_delivered_is_listed(tmp_path: Path, outbox: Outbox) -> None:
    del outbox
    found = listed(tmp_path)
    assert found["destinations"] == {"a": {"waiting": 1, "dead": 2}, "b": {"waiting": 3, "dead": 0}}
    assert [(each["step"], each["destination"], each["state"]) for each in found["events"]] == [
        (1, "a", "dead"),
        (1, "b", "waiting"),
        (2, "a", "dead"),
        (2, "b", "waiting"),
        (3, "a", "waiting"),
        (3, "b", "waiting"),
    ]
    first = found["events"][0]
    assert (first["type"], first["attempts"], first["error"]) == ("scored", 1, "status 500")
    assert first["data"]["metrics"] == {"loss": "nan"}
    assert [each["step"] for each in listed(tmp_path, "--state", "waiting", "--destination", "a")["events"]] == [3]
    assert [each["step"] for each in listed(tmp_path, "--state", "dead", "--limit", "1")["events"]] == [1]

    shown = events(tmp_path, "list", "--state", "dead").stdout.splitlines()
    assert shown[0] == "a: 1 waiting, 2 dead letters"
    assert shown[3].split()[:4] == [first["id"], "a", "scored", "1"]


def test_dead_letters_are_sent_again_or_dropped(tmp_path: Path, outbox: Outbox) -> None:
    first, second = (each["id"] for each in listed(tmp_path, "--state", "dead")["events"])

    assert json.loads(events(tmp_path, "resend", first, "--json").stdout) == {"resent": 1}
    again = outbox.next("a")
    assert again is not None
    assert (again.event.id, again.attempts) == (first, 0)
    assert events(tmp_path, "drop", second).stdout == "dropped: 1\n"
    assert events(tmp_path, "drop", "--all", "--waiting", "--destination", "b").stdout == "dropped: 3\n"
    assert outbox.counts() == {"a": DeliveryCounts(waiting=2), "b": DeliveryCounts()}


@pytest.mark.parametrize("arguments", [("resend",), ("drop",), ("resend", "--all", "id"), ("drop", "--all", "id")])
def test_events_are_chosen_by_their_ids_or_all(tmp_path: Path, outbox: Outbox, arguments: tuple[str, ...]) -> None:
    refused = events(tmp_path, *arguments)

    assert refused.exit_code == 2
    assert "or --all" in refused.stderr
    assert outbox.counts()["a"].dead == 2


@pytest.mark.parametrize("arguments", [("list",), ("resend", "--all"), ("drop", "--all")])
def test_a_folder_without_a_ledger_is_refused_and_left_alone(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = events(tmp_path, *arguments)
    assert result.exit_code == 2
    words = " ".join(result.stderr.split())
    assert f"there is no ledger.sqlite in {str(tmp_path)!r}; give the evaluator's state folder, RUN/evaluator" in words
    assert not [*tmp_path.iterdir()]
