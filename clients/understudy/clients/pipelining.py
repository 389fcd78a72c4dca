"""The streams of the client whose caller waits: its items are iterated on gRPC's thread.

`predict_many` of both clients keeps one mark per item, in the items' order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from understudy.clients import responses
from understudy.clients.client_errors import InternalError, InvalidArgumentError, UnderstudyError, translated
from understudy.clients.types import PredictResult
from understudy.v1 import prediction_pb2

Item = TypeVar("Item")
Outcome = PredictResult | UnderstudyError


@dataclass(frozen=True)
class Sent:
    """A request was sent, or the call is over: read the next response to find out."""


@dataclass(frozen=True)
class Unsendable:
    """An item that could not be turned into a request; only this item fails."""

    error: UnderstudyError


@dataclass(frozen=True)
class Exhausted:
    """There are no more items, since the caller's iterable ended or raised."""

    error: Exception | None = None


Mark = Sent | Unsendable | Exhausted


def check_items(items: object, in_flight: int) -> None:
    """Check the arguments of `predict_many` that are not for the server.

    Raises:
        InvalidArgumentError: The items are one batch by name, or no request may be unanswered.
    """
    if isinstance(items, Mapping):
        raise InvalidArgumentError(
            f"items is one mapping, of {', '.join(map(str, items))}; expected an iterable of batches, such as a list"
        )
    if in_flight < 1:
        raise InvalidArgumentError(f"in_flight is {in_flight}; at least 1 was expected")


def ended_early() -> InternalError:
    """Return the error for a server that ended a stream with requests unanswered."""
    return InternalError("the server ended the stream before it had answered every request")


class Pipeline:
    """Connects gRPC's thread, which consumes requests, with the caller's thread, which consumes outcomes.

    Args:
        items: The caller's items. Iterated on gRPC's thread, at most ``in_flight`` ahead.
        build: Returns the request for an item; raises UnderstudyError if the item is invalid.
        in_flight: The largest number of unanswered requests.
    """

    def __init__(
        self,
        items: Iterable[Item],
        build: Callable[[Item], prediction_pb2.PredictStreamRequest],
        *,
        in_flight: int,
    ) -> None:
        self._items = items
        self._build = build
        self._marks: queue.Queue[Mark] = queue.Queue(maxsize=in_flight)
        self._closed = False

    def requests(self) -> Iterator[prediction_pb2.PredictStreamRequest]:
        """Yield requests; runs on gRPC's thread."""
        try:
            for item in self._items:
                try:
                    request = self._build(item)
                except UnderstudyError as error:
                    self._marks.put(Unsendable(error))
                    continue
                self._marks.put(Sent())
                if self._closed:
                    return
                yield request
        except Exception as error:  # noqa: BLE001 - raised again on the caller's thread
            self._marks.put(Exhausted(error))
        else:
            self._marks.put(Exhausted())

    def outcomes(self, answers: Iterator[prediction_pb2.PredictStreamResponse]) -> Iterator[Outcome]:
        """Yield one outcome per item, in order; runs on the caller's thread."""
        while True:
            match self._marks.get():
                case Unsendable(error):
                    yield error
                case Exhausted(error):
                    if error is not None:
                        raise error
                    return
                case Sent():
                    with translated():
                        answer = next(answers, None)
                    if answer is None:
                        raise ended_early()
                    yield responses.streamed_prediction(answer)

    def wake(self) -> None:
        """Wake the caller's thread, since the call is over."""
        with suppress(queue.Full):  # then it is not asleep
            self._marks.put_nowait(Sent())

    def close(self) -> None:
        """Release gRPC's thread, which may be waiting for the caller to consume outcomes."""
        self._closed = True
        with suppress(queue.Empty):
            while True:
                self._marks.get_nowait()


Message = TypeVar("Message")


class Feed(Generic[Message]):
    """Wraps an iterator, which gRPC's thread draws from between `open` and `close`.

    It ends without an error when the iterator raises, and keeps the error for the caller's thread. Otherwise grpcio
    would log the error and report a cancelled call.
    """

    def __init__(self, messages: Iterator[Message]) -> None:
        self._messages = messages
        self._error: Exception | None = None
        self._opened = threading.Event()
        self._closed = False

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        self._opened.wait()
        if self._closed:
            raise StopIteration
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except Exception as error:
            self._error = error
            raise StopIteration from error

    def open(self) -> None:
        """Let gRPC's thread draw, once an interrupt of the caller's thread would end the call."""
        self._opened.set()

    def close(self) -> None:
        """Draw no more."""
        self._closed = True
        self._opened.set()

    def check(self) -> None:
        """Raise the error of the wrapped iterator, if it raised one."""
        if self._error is not None:
            raise self._error
