"""Checks each call: who calls, whether the caller may, and what it has under way against its limits."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from time import monotonic
from typing import Final

from understudy.evaluator.evaluator_errors import InvalidInputError, OverloadedError
from understudy.service.callers.directory import CallerDirectory
from understudy.service.calls.caller import Caller, CallUsage, RefusalCounter
from understudy.service.calls.methods import Method, RpcMethod
from understudy.service.calls.served_call import Call
from understudy.service.calls.status import PermissionDeniedError, UnauthenticatedError

AUTHORIZATION: Final = "authorization"

MAX_CALLERS: Final = 10_000
"""How many callers are counted at once. The longest silent one without calls is forgotten."""

RETRY_SECONDS: Final = 1.0

MESSAGES_UNDER_WAY: Final = 3
"""How many messages of an Evaluate, Compare or Replay stream are in memory: two are queued or computed, one is read."""


class CallerGuard:
    """Admits calls of known callers. Belongs to the event loop's thread.

    Args:
        directory: Finds the caller of a call.
        refusals: Counts refused calls.
        clock: Seconds, for the rates.
    """

    def __init__(
        self, directory: CallerDirectory, refusals: RefusalCounter, clock: Callable[[], float] = monotonic
    ) -> None:
        self._identify = directory.identify
        self._usage = AllUsage(clock)
        self._refused = refusals.count

    def admit(self, call: Call, method: Method) -> None:
        """Set the caller and the usage of a call, whose end releases it.

        Raises:
            UnauthenticatedError: It is not known who calls.
            PermissionDeniedError: The caller is in none of the method's groups.
            OverloadedError: The caller is beyond its limits.
        """
        if not method.access:
            return
        try:
            caller = self._caller_of(call)
        except UnauthenticatedError:
            self._refused["unauthenticated"]()
            raise
        call.caller = caller
        if caller.groups.isdisjoint(method.access):
            self._refused["permission_denied"]()
            raise PermissionDeniedError(method.denial(caller))
        try:
            call.usage = self._usage.enter(caller, method.rpc)
        except OverloadedError:
            self._refused["limit"]()
            raise

    def _caller_of(self, call: Call) -> Caller:
        if call.count_of(AUTHORIZATION) > 1:  # what is before the service may have checked the other one
            raise UnauthenticatedError("the call has more than one header authorization; send one")
        return self._identify(call.header(AUTHORIZATION), call.certificate_names)


class _CallerUsage:
    """What one caller has under way."""

    __slots__ = ("budget", "caller", "held_bytes", "refilled", "requests", "streams")

    def __init__(self, caller: Caller, now: float) -> None:
        self.caller = caller
        self.requests = 0
        self.streams = 0
        self.held_bytes = 0
        self.refilled = now
        self.budget = _burst(caller.limits.max_requests_per_second or 0.0)

    def refill(self, rate: float, now: float) -> None:
        """Add what the rate allows since the last time, at most one second's worth."""
        self.budget = min(_burst(rate), self.budget + (now - self.refilled) * rate)
        self.refilled = now


def _burst(rate: float) -> float:
    return max(1.0, rate)


class AllUsage:
    """What all callers have under way. Belongs to the event loop's thread.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._callers: OrderedDict[str, _CallerUsage] = OrderedDict()

    def enter(self, caller: Caller, method: RpcMethod) -> CallUsage:
        """Count a call that begins.

        Raises:
            OverloadedError: The caller is beyond its limits, or there are too many callers.
        """
        total, clock = self._usage_of(caller), self._clock
        usage = _StreamUsage(total, method, clock) if _is_stream(method) else _RequestUsage(total, clock)
        usage.enter()
        return usage

    def _usage_of(self, caller: Caller) -> _CallerUsage:
        usage = self._callers.get(caller.name)
        if usage is None:
            if len(self._callers) >= MAX_CALLERS:
                self._forget_one()
            usage = self._callers[caller.name] = _CallerUsage(caller, self._clock())
        else:
            self._callers.move_to_end(caller.name)
            usage.caller = caller  # its limits may have changed
        return usage

    def _forget_one(self) -> None:
        for name, usage in self._callers.items():
            if not (usage.requests or usage.streams):
                del self._callers[name]
                return
        raise OverloadedError(
            f"{MAX_CALLERS} callers have calls under way; try again", retry_after_seconds=RETRY_SECONDS
        )


def _is_stream(method: RpcMethod) -> bool:
    return method.streams_requests or method.streams_responses


class _RequestUsage(CallUsage):
    """A call of one request and one response."""

    __slots__ = ("_clock", "_held", "_is_over", "_unfinished", "_usage")

    def __init__(self, usage: _CallerUsage, clock: Callable[[], float]) -> None:
        super().__init__(usage.caller)
        self._usage = usage
        self._clock = clock
        self._held = 0
        self._unfinished = 0
        self._is_over = False

    def enter(self) -> None:
        """Count the call.

        Raises:
            OverloadedError: The caller is beyond its limits.
        """
        usage = self._usage
        limits = self.caller.limits
        if limits.max_requests is not None and usage.requests >= limits.max_requests:
            raise self._beyond(f"{usage.requests} requests under way", "max_requests")
        self._spend()
        usage.requests += 1

    def hold(self, size: int) -> None:
        """See `CallUsage`."""
        if not self._is_over:  # a message that a comparison's thread asked for may arrive after the end
            self._check_room(size, before=0)
            self._usage.held_bytes += size
            self._held += size

    def hold_unfinished(self, size: int) -> None:
        """See `CallUsage`."""
        if not self._is_over:
            self._check_room(size, before=self._unfinished)
            self._usage.held_bytes += size - self._unfinished
            self._unfinished = size

    def _check_room(self, size: int, *, before: int) -> None:
        """Check whether the caller may hold a message of this many bytes, of which it holds some already."""
        held, most = self._usage.held_bytes, self.caller.limits.max_bytes
        if most is None or size <= before or held + size - before <= most:
            return
        if size > most:
            raise InvalidInputError(
                f"a message has {size} bytes, and {self.caller.name} may have {most} under way (max_mib); send less"
            )
        raise self._beyond(f"{held} bytes under way, and {size - before} more would come", "max_mib")

    def release_oldest(self) -> None:
        """See `CallUsage`. The only message is given back when the call ends."""

    async def throttle(self) -> None:
        """See `CallUsage`. The only message has been counted as the call."""

    def leave(self) -> None:
        """See `CallUsage`."""
        if not self._is_over:
            self._is_over = True
            self._usage.held_bytes -= self._held + self._unfinished
            self._release_place()

    def _release_place(self) -> None:
        self._usage.requests -= 1

    def _spend(self) -> None:
        """Count one request against the rate."""
        usage, rate = self._usage, self.caller.limits.max_requests_per_second
        if rate is None:
            return
        usage.refill(rate, self._clock())
        if usage.budget < 1:
            raise self._beyond(
                f"used up its {rate:g} requests per second",
                "max_requests_per_second",
                seconds=(1 - usage.budget) / rate,
            )
        usage.budget -= 1

    def _beyond(self, what: str, limit: str, *, seconds: float = RETRY_SECONDS) -> OverloadedError:
        return OverloadedError(f"{self.caller.name} has {what} ({limit}); try again", retry_after_seconds=seconds)


class _StreamUsage(_RequestUsage):
    """A call with a stream of requests, of responses or of both."""

    __slots__ = ("_method", "_sizes")

    def __init__(self, usage: _CallerUsage, method: RpcMethod, clock: Callable[[], float]) -> None:
        super().__init__(usage, clock)
        self._method = method
        self._sizes: deque[int] = deque()

    def enter(self) -> None:
        """See `_RequestUsage`."""
        usage, most = self._usage, self.caller.limits.max_streams
        if most is not None and usage.streams >= most:
            raise self._beyond(f"{usage.streams} streams under way", "max_streams")
        self._spend()
        usage.streams += 1

    def hold(self, size: int) -> None:
        """See `CallUsage`. A stream that returns nothing before its end keeps its newest messages only."""
        if not self._method.streams_responses and len(self._sizes) == MESSAGES_UNDER_WAY:
            self.release_oldest()
        super().hold(size)
        self._sizes.append(size)

    def release_oldest(self) -> None:
        """See `CallUsage`."""
        if self._sizes and self._method.streams_requests and not self._is_over:
            size = self._sizes.popleft()
            self._held -= size
            self._usage.held_bytes -= size

    async def throttle(self) -> None:
        """See `CallUsage`. Its budget may become negative, so that several streams wait one after the other."""
        usage, rate = self._usage, self.caller.limits.max_requests_per_second
        if rate is None:
            return
        usage.refill(rate, self._clock())
        usage.budget -= 1
        if usage.budget < 0:
            await asyncio.sleep(-usage.budget / rate)

    def _release_place(self) -> None:
        self._usage.streams -= 1
