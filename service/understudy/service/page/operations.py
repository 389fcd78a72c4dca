"""What the page shows of the programs around the service: receivers of its events, and servers that follow it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from understudy.evaluator.evaluator_errors import LedgerError, VersionNotFoundError
from understudy.evaluator.records.outbox import MOST_DEAD, Delivery, DeliveryCounts, Outbox
from understudy.service.fleet.fleet_state import Fleet, FleetServer

LISTED_LETTERS: Final = 20
"""How many dead letters a page lists: the oldest."""
LISTED_SERVERS: Final = 50
"""How many servers a page lists: first those that do not serve what was decided."""


@dataclass(frozen=True, kw_only=True)
class LettersView:
    """The dead letters.

    Attributes:
        counts: What is undelivered, of each destination that has dead letters.
        letters: The oldest dead letters.
        total: How many there are.
    """

    counts: Mapping[str, DeliveryCounts]
    letters: Sequence[Delivery]
    total: int


@dataclass(frozen=True, kw_only=True)
class FleetView:
    """The servers that follow.

    Attributes:
        step: The step that they are to serve; None before the first decision.
        connected: How many are connected.
        current: How many of these serve it.
        servers: The servers, first those that do not.
        more: How many more there are.
    """

    step: int | None
    connected: int
    current: int
    servers: Sequence[FleetServer]
    more: int


class Operations:
    """Reads the dead letters and the fleet, and does what callers may with the letters. Its methods block.

    Args:
        outbox: Holds the events; None if nothing receives any.
        fleet: The servers that follow.
    """

    def __init__(self, outbox: Outbox | None, fleet: Fleet) -> None:
        self._outbox = outbox
        self._fleet = fleet

    def fingerprints(self) -> dict[str, object]:
        """Return a value for each part, which changes when what it shows does."""
        counts = None
        with contextlib.suppress(LedgerError):  # the page says so when it is loaded
            counts = self._dead()
        status = self._fleet.status()
        servers = [(each.name, each.connected, each.current, each.step, each.reason) for each in status.servers]
        return {"letters": counts, "fleet": (status.decision, servers)}

    def letters(self) -> LettersView | None:
        """Return the dead letters; None if there are none.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        counts = self._dead()
        if self._outbox is None or not counts:
            return None
        return LettersView(
            counts=counts,
            letters=self._outbox.entries(dead=True, limit=LISTED_LETTERS),
            total=sum(each.dead for each in counts.values()),
        )

    def fleet(self) -> FleetView | None:
        """Return the servers that follow; None if there are none."""
        status = self._fleet.status()
        if not status.servers:
            return None
        servers = sorted(status.servers, key=lambda server: (server.current, not server.connected, server.name))
        connected = sum(server.connected for server in servers)
        return FleetView(
            step=None if status.decision is None else status.decision.step,
            connected=connected,
            current=connected - status.behind,
            servers=servers[:LISTED_SERVERS],
            more=max(0, len(servers) - LISTED_SERVERS),
        )

    def letters_to(self, destination: str, first: int = 0, last: int | None = None) -> list[Delivery]:
        """Return the dead letters to a destination, from one up to another by their sequence numbers, the oldest first.

        Raises:
            VersionNotFoundError: There are none.
            LedgerError: The ledger cannot be read.
        """
        found = [] if self._outbox is None else self._entries(self._outbox, destination, first, last)
        if not found:
            these = "are no dead letters" if first != last else "is no such dead letter"
            raise VersionNotFoundError(f"there {these} to {destination!r} any more")
        return found

    def resend(self, destination: str, first: int, last: int) -> list[str]:
        """Make the dead letters to a destination due again, from one up to another; return the ids of their events.

        Raises:
            VersionNotFoundError: There are none.
            LedgerError: The ledger cannot be written.
        """
        ids = [letter.event.id for letter in self.letters_to(destination, first, last)]
        if self._outbox is not None:
            self._outbox.resend(ids=ids, destination=destination)
        return ids

    def drop(self, destination: str, first: int, last: int) -> list[str]:
        """Remove the dead letters to a destination, from one up to another; see `resend`."""
        ids = [letter.event.id for letter in self.letters_to(destination, first, last)]
        if self._outbox is not None:
            self._outbox.drop(ids=ids, destination=destination)
        return ids

    def _dead(self) -> dict[str, DeliveryCounts]:
        counts = {} if self._outbox is None else self._outbox.counts()
        return {name: each for name, each in counts.items() if each.dead}

    @staticmethod
    def _entries(outbox: Outbox, destination: str, first: int, last: int | None) -> list[Delivery]:
        found = outbox.entries(destination=destination, dead=True, after_sequence=first - 1, limit=2 * MOST_DEAD)
        return [letter for letter in found if last is None or letter.sequence <= last]
