"""FleetService: what servers that follow this evaluator call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Final

from understudy.evaluator.evaluator_errors import DrainingError, InvalidInputError, LoadError
from understudy.evaluator.serving.decision_file import ServingDecision
from understudy.service.calls.methods import CallContext, Requests
from understudy.service.fleet.fleet_state import Fleet, Member
from understudy.service.fleet.reading_places import ReadingPlaces
from understudy.service.fleet.sent_file import SentFile
from understudy.service.fleet.served_traffic import decode_shadow, decode_traffic, encode_counts
from understudy.service.readiness import Notifier, Readiness, ReadinessState
from understudy.service.served_model import ServedModel
from understudy.v1 import fleet_pb2

CHUNK_BYTES: Final = 2**18
"""The largest part of a file in one message; it has to fit into the messages that a server that follows receives."""

MAX_READS: Final = 8
"""How many files are read at once; others wait, and each connection has its turn."""

CONTACT_SECONDS = 30.0
"""How often it is checked that this server still has contact with the evaluator that it follows, if it follows one."""

PATIENCE_SECONDS = 8.0
"""How long a server may take for one part of a file, before its place is given to others."""

TRAFFIC_SECONDS: Final = 2.0
"""How often servers report traffic during a rollout."""

_KEPT_DECISIONS: Final = 1024
_LONGEST_NAME: Final = 256
_LONGEST_REASON: Final = 1000


class FleetHandler:
    """Sends servers what to serve, and keeps what they report. Belongs to the event loop's thread.

    Args:
        model: The served model, whose evaluator decides.
        fleet: Keeps the reports.
        readiness: The state of the service.
        software_version: The version of this program.
        has_contact: Whether this server reaches the evaluator that it follows; True if it follows none.
        executor: Runs blocking calls.

    Attributes:
        fleet: Keeps the reports.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        fleet: Fleet,
        readiness: Readiness,
        software_version: str,
        has_contact: Callable[[], bool],
        executor: Executor,
    ) -> None:
        self._model = model
        self._evaluator = model.evaluator
        self.fleet = fleet
        self._readiness = readiness
        self._software_version = software_version
        self._has_contact = has_contact
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._reads = ReadingPlaces(MAX_READS)
        self._changed = Notifier()
        self._decisions: deque[ServingDecision] = deque(maxlen=_KEPT_DECISIONS)
        self._added = 0
        self._evaluator.on_decision(self._on_decision)
        self._evaluator.use_fleet(fleet.followers)

    def stop(self) -> None:
        """Wake the streams, which end if the service drains."""
        self._changed.notify()

    async def follow(self, requests: Requests, call: CallContext) -> AsyncGenerator[fleet_pb2.FollowResponse, None]:
        """Yield the present decision and each later one; end once a while without contact to the own evaluator."""
        first = await anext(requests, None)
        if first is None:
            raise InvalidInputError("there is no request; say who follows in the first one")
        self._model.check_optional_name(first.model_name)
        name = first.name or call.peer
        if len(name) > _LONGEST_NAME:
            raise InvalidInputError(f"name has {len(name)} characters; give {_LONGEST_NAME} at most")
        with self.fleet.joined(name, call.peer, first.software_version[:_LONGEST_NAME]) as member:
            self._report(member, first)
            reading = asyncio.create_task(self._read_reports(requests, member, call))
            try:
                async with aclosing(self._each_decision(reading)) as decisions:
                    async for decision in decisions:
                        yield self._response(decision, name)
            finally:
                reading.cancel()
                await asyncio.wait([reading])

    def _response(self, decision: ServingDecision | None, name: str) -> fleet_pb2.FollowResponse:
        response = fleet_pb2.FollowResponse(software_version=self._software_version)
        if decision is None:
            return response
        response.decision.CopyFrom(_message(decision.of(name)))
        shadow = decision.shadow
        if shadow is not None:
            response.shadow.step, response.shadow.digest = shadow.key
            response.shadow.share, response.shadow.tolerance = shadow.share, shadow.tolerance
        if shadow is not None or decision.canary is not None:
            response.traffic_seconds = TRAFFIC_SECONDS
        return response

    async def _each_decision(self, reading: asyncio.Task[None]) -> AsyncGenerator[ServingDecision | None, None]:
        """Yield the present decision, if any, and each later one.

        It ends when the caller ends its reports, or when this server is found to be without contact to the evaluator
        that it follows: the caller may know an address that has it.
        """
        reading.add_done_callback(lambda _: self._changed.notify())
        sent = self._added
        yield self._decisions[-1] if self._decisions else None
        while True:
            changed = self._changed.subscribe()
            unsent, sent = self._added - sent, self._added
            for decision in list(self._decisions)[-unsent:] if unsent else ():
                yield decision
            if reading.done():
                reading.result()
                return
            self._check_not_draining("follow again")
            if self._added == sent and not await self._is_changed(changed):
                return

    def _check_not_draining(self, advice: str) -> None:
        if self._readiness.state is ReadinessState.DRAINING:
            raise DrainingError(f"{ReadinessState.DRAINING.value}; {advice}")

    async def _is_changed(self, changed: asyncio.Event) -> bool:
        """Wait for a change; return False if there is none and this server has no contact to its evaluator."""
        while True:
            try:
                async with asyncio.timeout(CONTACT_SECONDS):
                    await changed.wait()
            except TimeoutError:
                if not self._has_contact():
                    return False
            else:
                return True

    async def _read_reports(self, requests: Requests, member: Member, call: CallContext) -> None:
        async for request in requests:
            self._report(member, request)
            call.message_done()

    def _report(self, member: Member, request: fleet_pb2.FollowRequest) -> None:
        step = request.serving_step if request.HasField("serving_step") else None
        traffic = decode_traffic(request.traffic) if request.HasField("traffic") else None
        digest, reason = request.serving_digest[:_LONGEST_NAME], request.reason[:_LONGEST_REASON]
        shadow = decode_shadow(request.shadow) if request.HasField("shadow") else None
        if shadow is not None:
            shadow = replace(shadow, reason=shadow.reason[:_LONGEST_REASON])
        self.fleet.report(member, step, digest, reason, traffic=traffic, shadow=shadow)

    async def read_checkpoint(
        self, request: fleet_pb2.ReadCheckpointRequest, call: CallContext
    ) -> AsyncGenerator[fleet_pb2.ReadCheckpointResponse, None]:
        """Yield the parts of a file, until the service drains: the caller reads the rest once it is back."""
        self._model.check_optional_name(request.model_name)
        if request.offset < 0:
            raise InvalidInputError(f"offset is {request.offset}; give a number of bytes from 0 up")
        opening = partial(self._evaluator.open_file, request.path, step=request.step, digest=request.digest)
        async with self._reads.place(call.peer):
            file = SentFile(opening, offset=request.offset)
            try:
                while content := await self._loop.run_in_executor(self._executor, file.read, CHUNK_BYTES):
                    self._check_not_draining(f"read the rest of {request.path} later")
                    yield fleet_pb2.ReadCheckpointResponse(content=content)
            except OSError as error:
                raise LoadError(f"step {request.step} cannot be read: {error}") from error
            finally:
                self._executor.submit(file.close)

    async def get_fleet(self, request: fleet_pb2.GetFleetRequest, call: CallContext) -> fleet_pb2.GetFleetResponse:
        """Return every server that follows."""
        del call
        self._model.check_optional_name(request.model_name)
        status, rollout = self.fleet.status(), self._evaluator.rollout
        return fleet_pb2.GetFleetResponse(
            decision=None if status.decision is None else _message(status.decision),
            servers=[
                fleet_pb2.FleetServer(
                    name=server.name,
                    address=server.address,
                    software_version=server.software_version,
                    connected=server.connected,
                    current=server.current,
                    serving_step=server.step,
                    serving_digest=server.digest,
                    serving_seconds=server.serving_seconds,
                    lag_seconds=server.lag_seconds,
                    reason=server.reason,
                    canary=server.canary,
                )
                for server in status.servers
            ],
            rollout=None
            if rollout is None
            else fleet_pb2.Rollout(
                step=rollout.step,
                digest=rollout.digest,
                servers=rollout.servers,
                elapsed_seconds=rollout.elapsed_seconds,
                after_seconds=rollout.after_seconds,
                shadow=None if rollout.shadow is None else encode_counts(rollout.shadow),
                least_requests=rollout.least_requests,
            ),
        )

    def _on_decision(self, decision: ServingDecision) -> None:
        """Receive a decision, on this thread or one of the evaluator."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._add_decision, decision)

    def _add_decision(self, decision: ServingDecision) -> None:
        last = self._decisions[-1] if self._decisions else None
        if last is not None and not _is_later(decision, last):
            self._decisions.clear()
        self._decisions.append(decision)
        self._added += 1
        self.fleet.decided(decision)
        self._changed.notify()


def _is_later(decision: ServingDecision, than: ServingDecision) -> bool:
    """Return whether a decision is a later one of the same evaluator, whose state was not restored meanwhile."""
    return decision.evaluator_id == than.evaluator_id and decision.sequence > than.sequence


def _message(decision: ServingDecision) -> fleet_pb2.ServingDecision:
    return fleet_pb2.ServingDecision(
        evaluator_id=decision.evaluator_id,
        sequence=decision.sequence,
        step=decision.step,
        digest=decision.digest,
        replaced_evaluator_ids=decision.replaces,
    )
