"""Bounds the bytes that request messages of one port hold: unfinished bodies, and the messages of streams."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple, Self

from understudy.evaluator.evaluator_errors import OverloadedError
from understudy.service.calls.caller import CallUsage

ROOM_SECONDS: Final = 30.0
"""The longest wait of a stream for room."""
EXPECTING_SECONDS: Final = 1.0
"""How long room is kept for a message of a stream that is still to come."""
BRIEF_BYTES: Final = 1 << 16
"""No room is kept for smaller messages."""
_LITTLE_BYTES: Final = 1 << 20
"""A stream that holds no more than this may use the reserve."""
_RETRY_SECONDS: Final = 1.0


class _Waiter(NamedTuple):
    """A stream that waits for room."""

    more: int
    part: int
    granted: asyncio.Future[None]


class BodyBudget:
    """Bounds the bytes of the unfinished bodies and of the streams' messages. Belongs to the event loop's thread.

    An unfinished body is refused where there is no room for it. A stream waits before its next message, in the order of
    arrival, as those before it are answered in time. It begins one only while streams hold at most three quarters, so
    that there is room for the bodies of other calls and for what has begun, and an eighth more if it holds little, so
    that large messages do not hold up small ones.

    Args:
        max_bytes: The most bytes at once.

    Attributes:
        max_bytes: The most bytes at once.
        held_bytes: The bytes held now.
        turn: What has received a large piece holds it for a round of the loop before it receives more, so that many
            bodies that arrive together hold no other call up.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.turn = asyncio.Lock()
        self._streams_bytes = max_bytes // 4 * 3
        self._little_bytes = max_bytes // 8 * 7
        self._waiting: deque[_Waiter] = deque()
        self._unheld_bytes = 0

    def take(self, more: int) -> None:
        """Hold more bytes.

        Raises:
            OverloadedError: All together would hold too many.
        """
        if more > 0 and self.held_bytes + more > self.max_bytes:
            raise OverloadedError(
                f"unfinished requests and the messages of streams hold {self.held_bytes} bytes, and {more} more would "
                f"exceed the {self.max_bytes} of --max-body-mib; try again",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self.held_bytes += more
        if more < 0:
            self._admit_waiting()

    def has_room(self, more: int, *, part: int, own: int) -> bool:
        """Return whether a stream may hold more at once; a single message always may.

        Args:
            more: How many bytes.
            part: How many it holds of the same message.
            own: How many it holds in all.
        """
        total = self.held_bytes + more
        if own + more <= _LITTLE_BYTES and total <= self._little_bytes:
            return True
        return not self._waiting and (total <= self._streams_bytes or self.held_bytes == part)

    async def wait_for_room(self, more: int, *, part: int, arrived: bool) -> None:
        """Hold more bytes of a stream as soon as there is room for them.

        Args:
            more: How many.
            part: See `has_room`.
            arrived: Whether they are in memory already. Such bytes wait only while all of them fit beside what streams
                may hold.

        Raises:
            OverloadedError: There was no room in time, or too many bytes wait that are in memory.
        """
        unheld = more if arrived else 0
        if self.held_bytes + self._unheld_bytes + unheld > self.max_bytes:
            raise self._full(more, "")
        waiter = _Waiter(more, part, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._unheld_bytes += unheld
        try:
            await asyncio.wait((waiter.granted,), timeout=ROOM_SECONDS)
        except asyncio.CancelledError:
            self._abandon(waiter)
            raise
        finally:
            self._unheld_bytes -= unheld
        if not waiter.granted.done():
            self._abandon(waiter)
            raise self._full(more, f" within {ROOM_SECONDS:g} s")

    def _abandon(self, waiter: _Waiter) -> None:
        if waiter.granted.done():
            self.held_bytes -= waiter.more
        else:
            self._waiting.remove(waiter)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting:
            more, part, granted = self._waiting[0]
            if self.held_bytes > part and self.held_bytes + more > self._streams_bytes:
                return
            self._waiting.popleft()
            self.held_bytes += more
            granted.set_result(None)

    def _full(self, more: int, when: str) -> OverloadedError:
        return OverloadedError(
            f"the messages of all streams hold {self.held_bytes} of the {self.max_bytes} bytes of --max-body-mib, and "
            f"there was no room for {more} more{when}; try again, or send smaller batches",
            retry_after_seconds=_RETRY_SECONDS,
        )


class StreamReservation:
    """What the messages of one stream hold of a budget, until each is done. Belongs to the event loop's thread.

    Args:
        budget: The budget.
    """

    __slots__ = ("_arrived", "_budget", "_is_over", "_last", "_sizes", "_timer", "_total", "_unfinished")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._sizes: deque[int] = deque()
        self._arrived = 0
        self._unfinished = 0
        self._total = 0
        self._last = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    async def expect(self, size: int) -> None:
        """Keep room for a message that is still to come, with what of it has arrived, for `EXPECTING_SECONDS`.

        Raises:
            OverloadedError: There was no room in time.
        """
        if size > max(self._unfinished, BRIEF_BYTES) and not self._is_over:
            await self._hold_unfinished(size, arrived=False)
            if not self._is_over:
                self._timer = asyncio.get_running_loop().call_later(EXPECTING_SECONDS, self._expect_no_more)

    async def expect_another(self) -> None:
        """Keep room for a message like the last one, as `expect` does; do without if there is none in time.

        There may be no other message.
        """
        with suppress(OverloadedError):
            await self.expect(self._last)

    async def arrive(self, size: int) -> None:
        """Hold this many bytes of messages that are not complete, in place of those before.

        A message that has begun does not wait, as those that have begun and wait for each other would all stop.

        Raises:
            OverloadedError: There was no room in time, or there is none for a message that has begun.
        """
        if self._unfinished and not self._is_over:
            self._change(max(0, size - self._unfinished))
            self._unfinished = max(size, self._unfinished)
        elif size:
            await self._hold_unfinished(size, arrived=True)
        self._arrived = size

    def complete(self, size: int, *, unfinished: int = 0) -> None:
        """Hold a message of this many bytes, which has arrived, until it is done, and so many unfinished bytes."""
        if self._is_over:
            return
        self._stop_timer()
        self._sizes.append(size)
        self._last = size
        self._change(size + unfinished - self._unfinished)
        self._arrived = self._unfinished = unfinished

    async def grow(self, size: int) -> None:
        """Hold the newest message with this many bytes, as it has been decompressed.

        Raises:
            OverloadedError: There was no room in time.
        """
        if not self._sizes or size <= self._sizes[-1]:
            return
        more = size - self._sizes[-1]
        await self._hold(more, part=self._sizes[-1], arrived=True)
        if self._sizes:
            self._sizes[-1] += more

    def release_oldest(self) -> None:
        """Release the oldest message, which is done."""
        if self._sizes:
            self._change(-self._sizes.popleft())

    def close(self) -> None:
        """Release everything, as the call is over. Idempotent."""
        self._stop_timer()
        self._is_over = True
        self._sizes.clear()
        self._change(-self._total)

    async def _hold_unfinished(self, size: int, *, arrived: bool) -> None:
        self._stop_timer()
        await self._hold(size - self._unfinished, part=self._unfinished, arrived=arrived)
        self._unfinished = size

    async def _hold(self, more: int, *, part: int, arrived: bool) -> None:
        if self._budget.has_room(more, part=part, own=self._total):
            self._change(more)
        else:
            await self._budget.wait_for_room(more, part=part, arrived=arrived)
            self._total += more
        if self._is_over:
            self._change(-more)

    def _change(self, more: int) -> None:
        self._budget.take(more)
        self._total += more

    def _expect_no_more(self) -> None:
        self._timer = None
        self._change(self._arrived - self._unfinished)
        self._unfinished = self._arrived

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class BodyReservation:
    """What one body holds of a budget, inside a ``with`` block, whose end releases it.

    Args:
        budget: The budget.
        of_caller: What the call counts against its caller's limits; None without a caller.
    """

    __slots__ = ("_budget", "_held", "_of_caller")

    def __init__(self, budget: BodyBudget, of_caller: CallUsage | None) -> None:
        self._budget = budget
        self._of_caller = of_caller
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, error, traceback
        self.hold(0)

    def hold(self, size: int) -> None:
        """Hold this many bytes from now on, in place of those before.

        Raises:
            OverloadedError: All bodies together would hold too many, or those of the caller.
            InvalidInputError: The body is larger than all that its caller may have under way.
        """
        if self._of_caller is not None:
            self._of_caller.hold_unfinished(size)
        self._budget.take(size - self._held)
        self._held = size
