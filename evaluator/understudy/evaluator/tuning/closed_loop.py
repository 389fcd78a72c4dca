"""Callers in a closed loop, who load an engine as a service's callers do: one and two batches at a time, by turns.

What two batches at a time gain or lose depends on more than the model: the event loop, the handover between threads,
Python's lock and the transport take CPU time, too. So the engine of the service itself runs, with a transport that
costs about as much.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from understudy.evaluator.batching.engine import Engine, EngineSettings
from understudy.evaluator.batching.request_queue import RunnableSlot
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.types import Arrays, Outcome, Prediction

TURNS = 6
"""How many times each is measured with a load."""

_TURN_SECONDS = 0.1
_SETTLING_SECONDS = 0.02
_LEAST_BATCHES = 4
"""A turn lasts this many batches at least, and it settles for one."""
_CLOSE_SECONDS = 10.0
_TRANSPORT_BYTES = 1 << 17
"""What is hashed for each request, without Python's lock: about 70 µs, as a transport takes in C++."""


class Load(NamedTuple):
    """So many callers, each with one request of so many examples under way."""

    callers: int
    examples: int


LOADS = (Load(8, 1), Load(8, 8), Load(32, 1), Load(32, 8))


class Answers(NamedTuple):
    """How many requests were answered each second, in turns one after the other."""

    one_batch: float
    two_batches: float


def measure_loads(
    slot: RunnableSlot, inputs: dict[int, Arrays], settings: EngineSettings, *, batch_seconds: float
) -> list[list[Answers]]:
    """Return the answers of each turn with each of `LOADS`.

    Args:
        slot: The model.
        inputs: The inputs by the number of examples, for each that a load has.
        settings: The settings of the service's engine; ``concurrent_batches`` is measured with 1 and 2.
        batch_seconds: How long a batch takes, about.
    """
    return asyncio.run(_measure(slot, inputs, settings, batch_seconds))


async def _measure(
    slot: RunnableSlot, inputs: dict[int, Arrays], settings: EngineSettings, batch_seconds: float
) -> list[list[Answers]]:
    engine = Engine(settings, SilentObserver())
    try:
        with ThreadPoolExecutor(1) as transport:
            return [
                await _turns(_Callers(engine, slot, inputs[load.examples], transport), load, batch_seconds)
                for load in LOADS
            ]
    finally:
        await asyncio.to_thread(engine.close, _CLOSE_SECONDS)


async def _turns(callers: _Callers, load: Load, batch_seconds: float) -> list[Answers]:
    """Return the answers of each turn; which of both begins changes with each."""
    tasks = [asyncio.create_task(callers.call_until_closed()) for _ in range(load.callers)]
    found = []
    try:
        for turn in range(TURNS):
            rates: dict[int, float] = {}
            for batches in (1, 2) if turn % 2 else (2, 1):
                callers.set_batches(batches)
                rates[batches] = await _rate(callers, batch_seconds)
            found.append(Answers(rates[1], rates[2]))
    finally:
        callers.closed = True
        await asyncio.gather(*tasks)
    return found


async def _rate(callers: _Callers, batch_seconds: float) -> float:
    """Return how many requests are answered each second, from one delivery to another."""
    await asyncio.sleep(max(_SETTLING_SECONDS, batch_seconds))
    answered, began = callers.answered, callers.answered_at
    await asyncio.sleep(max(_TURN_SECONDS, _LEAST_BATCHES * batch_seconds))
    return max(1, callers.answered - answered) / max(callers.answered_at - began, batch_seconds, _SETTLING_SECONDS)


@dataclass(frozen=True, kw_only=True)
class _Handle:
    slot: RunnableSlot
    step: int = 0

    def release(self) -> None:
        """There is one model, which stays."""


class _Callers:
    """Callers of one engine, and the sink of their outcomes. Belongs to one event loop."""

    def __init__(self, engine: Engine, slot: RunnableSlot, inputs: Arrays, transport: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._handle = _Handle(slot=slot)
        self._inputs = inputs
        self._transport = transport
        self._message = bytes(_TRANSPORT_BYTES)
        self._loop = asyncio.get_running_loop()
        self._is_dispatching = False
        self.closed = False
        self.answered = 0
        self.answered_at = time.monotonic()

    def set_batches(self, concurrent: int) -> None:
        settings = self._engine.settings
        self._engine.set_batching(
            max_batch_size=settings.max_batch_size,
            gathering_seconds=settings.gathering_seconds,
            concurrent_batches=concurrent,
        )

    async def call_until_closed(self) -> None:
        """Send one request after another."""
        while not self.closed:
            await self._loop.run_in_executor(self._transport, hashlib.sha256, self._message)
            future: asyncio.Future[Prediction] = self._loop.create_future()
            self._engine.submit(
                self._inputs,
                borrow=lambda: self._handle,
                key=0,
                deadline=None,
                token=future,
                sink=self,
                dispatch=False,
            )
            if not self._is_dispatching:
                self._is_dispatching = True
                self._loop.call_soon(self._dispatch)
            await future

    def _dispatch(self) -> None:
        self._is_dispatching = False
        self._engine.dispatch()

    def begin(self, token: asyncio.Future[Prediction]) -> bool:
        """See `ResultSink`."""
        return not token.cancelled()

    def is_cancelled(self, token: asyncio.Future[Prediction]) -> bool:
        """See `ResultSink`."""
        return token.cancelled()

    def deliver(self, outcomes: Sequence[tuple[asyncio.Future[Prediction], Outcome]]) -> None:
        """See `ResultSink`."""
        self._loop.call_soon_threadsafe(self._resolve, outcomes)

    def _resolve(self, outcomes: Sequence[tuple[asyncio.Future[Prediction], Any]]) -> None:
        self.answered += len(outcomes)
        self.answered_at = time.monotonic()
        for future, outcome in outcomes:
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
