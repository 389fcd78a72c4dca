"""``understudy events``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from understudy.cli.command_errors import reported
from understudy.cli.output import print_json, print_table, say
from understudy.cli.values import LocalPath

if TYPE_CHECKING:
    from understudy.evaluator.records.outbox import Delivery, Outbox

_STATES = ("waiting", "dead", "all")
_MOST = 10_000

_state_dir = click.option(
    "--state-dir",
    required=True,
    type=LocalPath(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    envvar="UNDERSTUDY_STATE_DIR",
    help="The evaluator's state folder: RUN/evaluator, unless the server has another one.",
)
_destination = click.option("--destination", metavar="NAME", help="Only events for this webhook or exporter.")
_json = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
_ids = click.argument("ids", metavar="ID...", nargs=-1)
_every = click.option("--all", "every", is_flag=True, help="All of them, instead of those with given ids.")


@click.group("events")
def command() -> None:
    """Show the events that wait to be delivered and the dead letters; send those again or drop them.

    The commands read and write the ledger in the state folder, whether or not the server runs; a running one notices
    within about a second.
    """


@command.command("list")
@click.option(
    "--state",
    type=click.Choice(_STATES),
    default="all",
    show_default=True,
    help="Those that wait, the dead letters, or both.",
)
@click.option("--limit", type=click.IntRange(1, _MOST), default=100, show_default=True, help="At most so many.")
@_destination
@_json
@_state_dir
def list_command(*, state: str, limit: int, destination: str | None, as_json: bool, state_dir: Path) -> None:
    """Show what is not delivered, the oldest first."""
    dead = {"waiting": False, "dead": True, "all": None}[state]
    with _outbox(state_dir) as outbox:
        deliveries = outbox.entries(destination=destination, dead=dead, limit=limit)
        counts = outbox.counts()
    if as_json:
        totals = {name: {"waiting": each.waiting, "dead": each.dead} for name, each in counts.items()}
        print_json({"destinations": totals, "events": [_values(each) for each in deliveries]})
        return
    for name, count in counts.items():
        say(f"{name}: {count.waiting} waiting, {count.dead} dead letters")
    print_table(("id", "destination", "event", "step", "occurred", "state", "attempts", "error"), _rows(deliveries))


@command.command("resend")
@_ids
@_every
@_destination
@_json
@_state_dir
def resend_command(
    *, ids: tuple[str, ...], every: bool, destination: str | None, as_json: bool, state_dir: Path
) -> None:
    """Send dead letters again, with their ids."""
    _check_choice(ids, every)
    with _outbox(state_dir) as outbox:
        count = outbox.resend(ids=ids, destination=destination)
    _print_count("resent", count, as_json)


@command.command("drop")
@_ids
@_every
@click.option("--waiting", is_flag=True, help="Also those that wait, such as for a webhook that is gone.")
@_destination
@_json
@_state_dir
def drop_command(
    *, ids: tuple[str, ...], every: bool, waiting: bool, destination: str | None, as_json: bool, state_dir: Path
) -> None:
    """Drop dead letters."""
    _check_choice(ids, every)
    with _outbox(state_dir) as outbox:
        count = outbox.drop(ids=ids, destination=destination, waiting=waiting)
    _print_count("dropped", count, as_json)


@contextmanager
def _outbox(state_dir: Path) -> Iterator[Outbox]:
    from understudy.evaluator.evaluator_errors import LedgerError
    from understudy.evaluator.records.ledger_file import LEDGER_FILE
    from understudy.evaluator.records.outbox import Outbox

    if not (state_dir / LEDGER_FILE).is_file():
        raise click.BadParameter(
            f"there is no {LEDGER_FILE} in {str(state_dir)!r}; give the evaluator's state folder, RUN/evaluator unless "
            "the server has another one",
            param_hint="'--state-dir'",
        )
    outbox = Outbox(state_dir / LEDGER_FILE)
    try:
        with reported(LedgerError):
            yield outbox
    finally:
        outbox.close()


def _check_choice(ids: Sequence[str], every: bool) -> None:  # noqa: FBT001 - a flag of the command
    if bool(ids) == every:
        raise click.UsageError("Give the ids that `understudy events list` shows, or --all.")


def _print_count(word: str, count: int, as_json: bool) -> None:  # noqa: FBT001 - a flag of the command
    if as_json:
        print_json({word: count})
    else:
        say(f"{word}: {count}")


def _rows(deliveries: Sequence[Delivery]) -> list[tuple[str, ...]]:
    return [
        (
            each.event.id,
            each.destination,
            each.event.type.value,
            str(each.event.step),
            f"{datetime.fromtimestamp(each.event.occurred_at, UTC).astimezone():%Y-%m-%d %H:%M:%S}",
            "waiting" if each.dead_at is None else "dead",
            str(each.attempts),
            each.error,
        )
        for each in deliveries
    ]


def _values(delivery: Delivery) -> dict[str, Any]:
    event = delivery.event
    return {
        "id": event.id,
        "destination": delivery.destination,
        "type": event.type.value,
        "step": event.step,
        "checkpoint_digest": event.checkpoint_digest,
        "occurred_at": _time(event.occurred_at),
        "data": event.data,
        "state": "waiting" if delivery.dead_at is None else "dead",
        "attempts": delivery.attempts,
        "error": delivery.error,
        "due_at": _time(delivery.due_at or None),
        "dead_at": _time(delivery.dead_at),
    }


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
