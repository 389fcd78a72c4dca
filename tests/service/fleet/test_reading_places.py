from __future__ import annotations

import asyncio

import pytest

from understudy.service.fleet.reading_places import ReadingPlaces


class Reader:
    """Reads from when it has a place until `end`."""

    def __init__(self, places: ReadingPlaces, connection: str) -> None:
        self.has_place = asyncio.Event()
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._read(places, connection))

    async def _read(self, places: ReadingPlaces, connection: str) -> None:
        async with places.place(connection):
            self.has_place.set()
            await self._end.wait()

    async def end(self) -> None:
        self._end.set()
        await self.task
        await settled()


async def settled() -> None:
    """Let everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_connections_that_wait_have_their_turn_however_many_calls_of_each_wait() -> None:
    places = ReadingPlaces(1)
    first, *greedy = [Reader(places, "greedy") for _ in range(3)]
    await settled()
    other = Reader(places, "other")
    await settled()
    await first.end()
    assert (greedy[0].has_place.is_set(), other.has_place.is_set()) == (True, False)
    await greedy[0].end()
    assert (greedy[1].has_place.is_set(), other.has_place.is_set()) == (False, True)
    await other.end()
    assert greedy[1].has_place.is_set()
    await greedy[1].end()
    last = Reader(places, "last")
    await settled()
    assert last.has_place.is_set()
    await last.end()


async def test_a_call_that_goes_away_loses_no_place_whether_it_waits_or_has_just_got_one() -> None:
    places = ReadingPlaces(1)
    first = Reader(places, "a")
    await settled()
    waits, gets_it, next_one = (Reader(places, "b") for _ in range(3))
    await settled()
    waits.task.cancel()
    await settled()
    first._end.set()
    await first.task  # the place is passed on, and its new owner has not run yet
    gets_it.task.cancel()
    for each in (waits, gets_it):
        with pytest.raises(asyncio.CancelledError):
            await each.task
    await settled()
    assert next_one.has_place.is_set()
    await next_one.end()
