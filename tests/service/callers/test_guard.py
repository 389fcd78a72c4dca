"""The limits of callers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.evaluator.evaluator_errors import InvalidInputError, OverloadedError
from understudy.service.callers import guard
from understudy.service.callers.guard import AllUsage
from understudy.service.calls.caller import Caller, Limits
from understudy.service.calls.methods import RpcMethod

UNARY = RpcMethod(service="s", name="Unary", rpc_type="unary")
CLIENT_STREAM = RpcMethod(service="s", name="Collect", rpc_type="client_stream")
SERVER_STREAM = RpcMethod(service="s", name="Watch", rpc_type="server_stream")
BIDI = RpcMethod(service="s", name="Exchange", rpc_type="bidi_stream")
MIB = 1024 * 1024


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def caller(name: str = "ada", **limits: Any) -> Caller:
    return Caller(name=name, groups=frozenset(), limits=Limits(**limits))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def usage(clock: Clock) -> AllUsage:
    return AllUsage(clock)


def test_requests_and_streams_are_counted_apart_and_by_caller(usage: AllUsage) -> None:
    ada = caller(max_requests=2, max_streams=1)
    first = usage.enter(ada, UNARY)
    usage.enter(ada, UNARY)
    with pytest.raises(OverloadedError, match=r"ada has 2 requests under way \(max_requests\)") as refused:
        usage.enter(ada, UNARY)
    assert refused.value.retry_after_seconds > 0
    usage.enter(ada, SERVER_STREAM)
    with pytest.raises(OverloadedError, match="max_streams"):
        usage.enter(ada, BIDI)
    usage.enter(caller("bob", max_requests=1), UNARY)
    first.leave()
    first.leave()
    usage.enter(ada, UNARY)


def test_bytes_are_held_until_the_call_ends(usage: AllUsage) -> None:
    ada = caller(max_mib=1)
    first, second = usage.enter(ada, UNARY), usage.enter(ada, UNARY)
    first.hold(MIB - 10)
    with pytest.raises(OverloadedError, match="max_mib"):
        second.hold(11)
    with pytest.raises(InvalidInputError, match=f"may have {MIB} under way"):
        second.hold(MIB + 1)
    first.leave()
    second.hold(MIB)


def test_an_unfinished_body_counts_until_it_is_whole(usage: AllUsage) -> None:
    ada = caller(max_mib=1)
    slow, other = usage.enter(ada, UNARY), usage.enter(ada, UNARY)
    for size in (MIB // 4, MIB // 2, MIB * 3 // 4):
        slow.hold_unfinished(size)
    with pytest.raises(OverloadedError, match="max_mib"):
        other.hold_unfinished(MIB // 2)
    with pytest.raises(InvalidInputError, match=f"may have {MIB} under way"):
        slow.hold_unfinished(MIB + 1)
    slow.hold_unfinished(0)
    slow.hold(MIB)
    slow.leave()
    other.hold_unfinished(MIB)
    other.leave()
    usage.enter(ada, UNARY).hold(MIB)


def test_a_stream_holds_its_unanswered_messages_or_its_newest_ones(usage: AllUsage) -> None:
    ada = caller(max_mib=1)
    exchange = usage.enter(ada, BIDI)
    for _ in range(4):
        exchange.hold(MIB // 4)
    with pytest.raises(OverloadedError):
        exchange.hold(1)
    exchange.release_oldest()
    exchange.hold(MIB // 4)
    exchange.leave()
    collect = usage.enter(ada, CLIENT_STREAM)
    for _ in range(100):
        collect.hold(MIB // 3)
    collect.leave()
    collect.hold(MIB)  # of a thread that asked before the end
    usage.enter(ada, UNARY).hold(MIB)


def test_the_rate_says_when_to_try_again(usage: AllUsage, clock: Clock) -> None:
    ada = caller(max_requests_per_second=4)
    for _ in range(4):
        usage.enter(ada, UNARY)
    with pytest.raises(OverloadedError, match="used up its 4 requests per second") as refused:
        usage.enter(ada, UNARY)
    assert refused.value.retry_after_seconds == 0.25
    clock.now += 0.25
    usage.enter(ada, UNARY)


async def test_a_streams_messages_wait_for_their_turn(
    usage: AllUsage, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    stream = usage.enter(caller(max_requests_per_second=2), BIDI)
    for _ in range(5):
        await stream.throttle()
    assert waited == [0.5, 0.5, 0.5, 0.5]


def test_changed_limits_apply_to_the_next_call(usage: AllUsage) -> None:
    usage.enter(caller(max_requests=1), UNARY)
    with pytest.raises(OverloadedError):
        usage.enter(caller(max_requests=1), UNARY)
    usage.enter(caller(max_requests=2), UNARY)


def test_the_number_of_callers_is_bounded(usage: AllUsage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_CALLERS", 3)
    for number in range(20):
        usage.enter(caller(f"silent-{number}"), UNARY).leave()
    assert len(usage._callers) == 3
    shares = [usage.enter(caller(f"busy-{number}"), UNARY) for number in range(3)]
    with pytest.raises(OverloadedError, match="3 callers have calls under way"):
        usage.enter(caller("one more"), UNARY)
    shares[1].leave()
    usage.enter(caller("one more"), UNARY)


@given(
    st.lists(
        st.tuples(st.sampled_from([UNARY, CLIENT_STREAM, SERVER_STREAM, BIDI]), st.lists(st.integers(0, MIB))),
        max_size=20,
    ),
    st.data(),
)
def test_nothing_is_counted_when_all_calls_have_ended(
    calls: list[tuple[RpcMethod, list[int]]], data: st.DataObject
) -> None:
    usage = AllUsage(Clock())
    ada = caller(max_requests=5, max_streams=5, max_mib=3)
    open_shares = []
    for method, sizes in calls:
        try:
            share = usage.enter(ada, method)
        except OverloadedError:
            continue
        open_shares.append(share)
        for size in sizes:
            try:
                share.hold(size)
            except OverloadedError:
                break
            if data.draw(st.booleans()):
                share.release_oldest()
        counted = usage._callers["ada"]
        assert 0 <= counted.held_bytes <= 3 * MIB
        assert counted.requests <= 5
        assert counted.streams <= 5
    for share in data.draw(st.permutations(open_shares)):
        share.leave()
    for counted in usage._callers.values():
        assert (counted.requests, counted.streams, counted.held_bytes) == (0, 0, 0)
