"""What tells callers apart where they share a full queue."""

from __future__ import annotations

from understudy.service.calls.caller import Caller
from understudy.service.calls.methods import CallContext


class Connected(CallContext):
    """A call over a connection."""

    def __init__(self, peer: str, caller: str | None = None) -> None:
        super().__init__(deadline=None)
        self._peer = peer
        if caller is not None:
            self.caller = Caller(name=caller, groups=frozenset())

    @property
    def peer(self) -> str:
        return self._peer


def test_a_caller_with_a_name_is_the_same_over_all_its_connections() -> None:
    assert Connected("10.0.0.1:1", "batch").caller_key() == Connected("10.0.0.2:2", "batch").caller_key()
    assert Connected("10.0.0.1:1", "batch").caller_key() != Connected("10.0.0.1:1", "page").caller_key()


def test_without_names_each_connection_is_a_caller() -> None:
    assert Connected("10.0.0.1:1").caller_key() == Connected("10.0.0.1:1").caller_key()
    assert Connected("10.0.0.1:1").caller_key() != Connected("10.0.0.1:2").caller_key()
