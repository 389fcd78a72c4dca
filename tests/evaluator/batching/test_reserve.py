"""What a caller that fills the queue leaves to others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testkit.engine_harness import TIMEOUT, EngineHarness, outputs
from understudy.evaluator.batching.reserve import Reserve
from understudy.evaluator.evaluator_errors import OverloadedError

QUEUE = 144
"""With a reserve of 18 examples, or 2,304 bytes as in `BYTES`."""
BYTES = 128 * QUEUE
OTHERS = 30


@pytest.fixture
def harness() -> Iterator[EngineHarness]:
    """An engine whose device is busy."""
    built = EngineHarness(max_batch_size=8, max_queue_examples=QUEUE, max_queue_bytes=BYTES)
    built.occupy()
    yield built
    built.close()


FILLING: dict[str, Any] = {
    "examples, in one request": lambda harness: harness.predict(*range(QUEUE), caller="greedy"),
    "examples, in many requests": lambda harness: [harness.predict(0.0, caller="greedy") for _ in range(QUEUE)],
    "bytes": lambda harness: harness.predict(0.0, width=BYTES // 4, caller="greedy"),
    "more bytes than the queue holds": lambda harness: harness.predict(0.0, width=BYTES, caller="greedy"),
}


@pytest.mark.parametrize("fill", FILLING.values(), ids=FILLING)
def test_a_caller_that_fills_the_queue_leaves_room_to_one_that_asks_for_little(
    harness: EngineHarness, fill: Any
) -> None:
    fill(harness)
    harness.engine.check_admission(None, caller=lambda: "honest")
    honest = harness.predict(5.0, width=4, caller="honest")
    harness.go()
    assert outputs(honest) == [10.0]
    assert harness.observer.reasons == []


def test_one_caller_alone_may_fill_the_queue_and_a_ninth_of_the_reserve(harness: EngineHarness) -> None:
    accepted = [harness.predict(0.0, caller="greedy") for _ in range(QUEUE + 2)]
    with pytest.raises(OverloadedError, match=f"{QUEUE + 2} examples are waiting and at most {QUEUE} may"):
        harness.predict(0.0, caller="greedy")
    harness.engine._swept_at = float("inf")  # no sweep may make room
    with pytest.raises(OverloadedError):
        harness.engine.check_admission(None, caller=lambda: "greedy")
    harness.go()
    assert [outputs(future) for future in accepted] == [[0.0]] * len(accepted)


def test_one_that_asks_for_much_is_refused_beside_a_full_queue(harness: EngineHarness) -> None:
    harness.predict(*range(QUEUE), caller="greedy")
    with pytest.raises(OverloadedError, match="are waiting and at most"):
        harness.predict(*range(3), caller="other")


def test_one_whose_inputs_are_large_is_refused_beside_a_queue_full_of_bytes(harness: EngineHarness) -> None:
    harness.predict(0.0, width=BYTES // 4, caller="greedy")
    with pytest.raises(OverloadedError, match=f"hold {BYTES} bytes, and 400 more would exceed the {BYTES} of"):
        harness.predict(0.0, width=100, caller="other")


@pytest.mark.parametrize("ends", ["computed", "cancelled"])
def test_what_waited_in_the_reserve_gives_its_room_back(harness: EngineHarness, ends: str) -> None:
    waiting = [harness.predict(*range(QUEUE), caller="greedy"), harness.predict(1.0, 2.0, caller="honest")]
    with pytest.raises(OverloadedError):
        harness.predict(3.0, caller="honest")
    harness.engine._swept_at = float("-inf")
    if ends == "cancelled":
        assert waiting.pop().cancel()
        harness.predict(3.0, caller="honest")
    harness.go()
    for future in waiting:
        future.result(TIMEOUT)
    assert outputs(harness.predict(4.0, caller="honest")) == [8.0]
    reserve = harness.engine._scheduler.predicts.reserve
    assert (reserve.examples, reserve.size, reserve._held) == (0, 0, {})


def test_even_many_callers_that_take_all_they_may_leave_room_to_another() -> None:
    reserve = Reserve(4096, 1 << 30)
    for caller in range(OTHERS):
        while reserve.admits(caller, 1, 1):
            reserve.add(caller, 1, 1)
    assert reserve.examples > 400
    assert reserve.admits("honest", 1, 1)
