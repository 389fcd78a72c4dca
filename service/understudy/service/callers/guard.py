"""Checks each call: who calls, whether the caller may, and whether it is within the caller's limits."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Final

from understudy.evaluator.evaluator_errors import OverloadedError
from understudy.service.callers.directory import CallerDirectory
from understudy.service.callers.usage import AllUsage
from understudy.service.calls.methods import Method
from understudy.service.calls.metrics import RefusalCounter
from understudy.service.calls.served_call import Call
from understudy.service.calls.status import PermissionDeniedError, UnauthenticatedError

AUTHORIZATION: Final = "authorization"


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
        """Set the caller and the share of a call, whose end gives the share back.

        Raises:
            UnauthenticatedError: It is not known who calls.
            PermissionDeniedError: The caller is in none of the method's groups.
            OverloadedError: The caller is beyond its limits.
        """
        if not method.access:
            return
        try:
            caller = self._identify(call.header(AUTHORIZATION), call.certificate_names)
        except UnauthenticatedError:
            self._refused["unauthenticated"]()
            raise
        call.caller = caller
        if caller.groups.isdisjoint(method.access):
            self._refused["permission_denied"]()
            raise PermissionDeniedError(method.denial(caller))
        try:
            call.share = self._usage.enter(caller, method.rpc)
        except OverloadedError:
            self._refused["limit"]()
            raise
