"""Who calls: the caller's name, its groups, which say what it may call, its limits, and the count of refusals."""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final

from prometheus_client import CollectorRegistry, Counter


class Group(enum.StrEnum):
    """What a caller may do."""

    PREDICT = "predict"
    EVALUATE = "evaluate"
    PROMOTE = "promote"
    OBSERVE = "observe"
    FOLLOW = "follow"


Access = frozenset[Group]
"""The groups of which a method's caller needs one; empty if it is open to all."""

OPEN_TO_ALL: Final[Access] = frozenset()
ANY_GROUP: Final[Access] = frozenset(Group)


def only(group: Group) -> Access:
    """Return the access of a method for callers in one group."""
    return frozenset({group})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one caller; None for no limit of its own.

    Attributes:
        max_requests: The most calls of one request under way at once.
        max_streams: The most calls with streams under way at once.
        max_mib: The most memory of its requests under way, in MiB.
        max_requests_per_second: How many requests may begin in a second; a stream's messages count too.
        max_evaluate_streams: The most Evaluate streams at once, and the most Replay streams.
        max_compare_streams: The most Compare streams at once.
    """

    max_requests: int | None = None
    max_streams: int | None = None
    max_mib: float | None = None
    max_requests_per_second: float | None = None
    max_evaluate_streams: int = 16
    max_compare_streams: int = 2

    @property
    def max_bytes(self) -> int | None:
        """`max_mib` in bytes."""
        return None if self.max_mib is None else int(self.max_mib * 1024 * 1024)


@dataclass(frozen=True, kw_only=True)
class Caller:
    """One caller.

    Attributes:
        name: Its name, in the audit log and the access log.
        groups: What it may do.
        limits: Its limits.
    """

    name: str
    groups: frozenset[Group]
    limits: Limits = field(default_factory=Limits)


class CallUsage(ABC):
    """What one call counts against its caller's limits. Belongs to the event loop's thread.

    Attributes:
        caller: The caller.
    """

    __slots__ = ("caller",)

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    @abstractmethod
    def hold(self, size: int) -> None:
        """Count the bytes of a message that has arrived.

        Raises:
            InvalidInputError: It is larger than all that the caller may hold.
            OverloadedError: All messages of the caller together are too large.
        """

    @abstractmethod
    def hold_unfinished(self, size: int) -> None:
        """Count the bytes of a message that is still arriving, in place of those before; see `hold` for the errors."""

    @abstractmethod
    def release_oldest(self) -> None:
        """Release the bytes of the oldest message of the call."""

    @abstractmethod
    async def throttle(self) -> None:
        """Wait until the next message of a stream is within the caller's rate."""

    @abstractmethod
    def leave(self) -> None:
        """Release everything, as the call is over."""


_REFUSALS = ("unauthenticated", "permission_denied", "limit")


class RefusalCounter:
    """Counts refused calls by reason.

    Args:
        registry: Where to register the metric.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = Counter(
            "understudy_refused_calls_total",
            "Calls refused for their caller: it is not known, lacks the group, or is beyond its limits (--callers).",
            ["reason"],
            registry=registry,
        )
        self.count = {reason: counter.labels(reason).inc for reason in _REFUSALS}


_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/?#@\[\]\\]+))(?::\d*)?")
"""An address in brackets or a name, and a port (RFC 9110, 7.2)."""


def host_name(host: str | None) -> str:
    """Return the name or address in a Host header, without the port; empty if it has none or is malformed."""
    found = _HOST.fullmatch(host or "")
    return "" if found is None else (found[1] or found[2]).lower()


def is_direct(host: str | None) -> bool:
    """Return whether a Host header is an address or ``localhost``, which no other site's name can stand for."""
    name = host_name(host)
    if name == "localhost":
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
