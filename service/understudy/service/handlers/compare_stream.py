"""The implementation of a Compare stream, and its batches on disk for versions that score them later."""

from __future__ import annotations

import asyncio
import struct
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from understudy.evaluator.evaluation.comparison import Comparison
from understudy.evaluator.evaluator_errors import CancelledError, InvalidInputError, OverloadedError, StorageError
from understudy.evaluator.types import Batch, Signature
from understudy.service.calls.caller import Caller
from understudy.service.calls.methods import CallContext
from understudy.service.calls.parsing import ZeroCopyMessage
from understudy.service.handlers import messages
from understudy.service.handlers.evaluate_stream import BatchStream, StreamLimits
from understudy.service.served_model import ServedModel, abandon, begun
from understudy.v1 import evaluation_pb2

_RETRY_SECONDS = 60.0

_LENGTH = struct.Struct("<q")


class Spools:
    """Creates spools, which share one quota. Thread-safe.

    Args:
        folder: The folder of their files; the temporary folder if None.
        max_bytes: The most that all spools together may hold; those of one known caller may hold half of it.
    """

    def __init__(self, folder: Path | None, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._bytes = 0
        self._bytes_of: Counter[str] = Counter()

    def open(self, caller: Caller | None = None) -> Spool:
        """Return an empty spool for a caller, if it is known. Close the spool after use.

        Raises:
            StorageError: The folder does not exist or is not writable.
        """
        return Spool(self, self._folder, None if caller is None else caller.name)

    def take(self, size: int, caller: str | None) -> None:
        """Count written bytes; raise OverloadedError if they exceed the quota or the caller's half of it."""
        with self._lock:
            if self._bytes + size > self._max_bytes:
                raise _beyond("all comparisons", self._max_bytes)
            if caller is not None:
                if self._bytes_of[caller] + size > self._max_bytes // 2:
                    raise _beyond(f"{caller}'s comparisons", self._max_bytes // 2)
                self._bytes_of[caller] += size
            self._bytes += size

    def release(self, size: int, caller: str | None) -> None:
        """Count deleted bytes."""
        with self._lock:
            self._bytes -= size
            if caller is not None:
                self._bytes_of -= Counter({caller: size})  # drops callers without bytes


class Spool:
    """Batches in an unnamed temporary file, which is deleted on close. For one thread.

    Args:
        quota: Counts the bytes.
        folder: See `Spools`.
        caller: The name of the caller, if it is known.

    Raises:
        StorageError: The file cannot be created.
    """

    def __init__(self, quota: Spools, folder: Path | None, caller: str | None) -> None:
        try:
            self._file = tempfile.TemporaryFile(prefix="understudy-batches-", dir=folder)  # noqa: SIM115 - until close
        except OSError as error:
            raise _unkept(error) from error
        self._quota = quota
        self._caller = caller
        self._bytes = 0

    def write(self, batch: evaluation_pb2.EvaluateBatch) -> None:
        """Add a batch.

        Raises:
            OverloadedError: The batch exceeds the quota.
            StorageError: The disk is full or fails.
        """
        content = batch.SerializeToString()
        size = _LENGTH.size + len(content)
        self._quota.take(size, self._caller)
        self._bytes += size
        try:
            self._file.write(_LENGTH.pack(len(content)))
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            raise _unkept(error) from error

    def read(self) -> Iterator[evaluation_pb2.EvaluateBatch]:
        """Yield the batches from the beginning."""
        self._file.seek(0)
        while length := self._file.read(_LENGTH.size):
            yield evaluation_pb2.EvaluateBatch.FromString(self._file.read(*_LENGTH.unpack(length)))

    def close(self) -> None:
        """Delete the file. Idempotent."""
        self._file.close()
        self._quota.release(self._bytes, self._caller)
        self._bytes = 0


def _beyond(whose: str, max_bytes: int) -> OverloadedError:
    return OverloadedError(
        f"the batches of {whose}, kept for versions that are not loaded, exceed {max_bytes} bytes; compare versions "
        "that are loaded, or on a dataset of the server, or on fewer examples",
        retry_after_seconds=_RETRY_SECONDS,
    )


def _unkept(error: OSError) -> StorageError:
    return StorageError(
        f"the batches cannot be kept for versions that are not loaded ({error.strerror}); make room in the server's "
        "folder for them, or choose another one with --spool-dir"
    )


Incoming = BatchStream[evaluation_pb2.CompareRequest]


async def compare_stream(
    model: ServedModel,
    requests: AsyncIterator[evaluation_pb2.CompareRequest],
    call: CallContext,
    *,
    executor: Executor,
    limits: StreamLimits,
    spools: Spools,
) -> Comparison:
    """Compare versions on the batches of a stream, or on a dataset.

    Args:
        model: The served model, whose evaluator runs the comparison.
        requests: Options, then batches unless the options name a dataset.
        call: The call that the stream belongs to.
        executor: Runs blocking calls.
        limits: The limits of the stream.
        spools: Store batches for versions that are not loaded.

    Raises:
        UnknownModelError: The options name another model.
        InvalidInputError: There are no options, they are invalid, or batches and a dataset are both present or both
            missing.
        StreamIdleError: The stream was idle for too long, or lasted too long.
    """
    incoming: Incoming = BatchStream(requests, limits)
    first = await incoming.first()
    if first is None:
        raise InvalidInputError("the first message is a batch; send options with the versions to compare first")
    options = first.options
    call.message_done()
    model.check_optional_name(options.model_name)
    if options.dataset and await incoming.next_batch() is not None:
        raise InvalidInputError(f"got a batch beside the dataset {options.dataset!r}; send one or the other")
    batches = StreamedBatches(incoming, asyncio.get_running_loop(), spools, call)
    compare = partial(
        model.evaluator.compare,
        [messages.version(version) for version in options.versions],
        options.dataset or batches,
        metrics=messages.metric_specs(options.metrics),
        bootstrap=messages.bootstrap_options(options),
        deadline=call.deadline,
        progress=call.progress,
    )
    comparing = await begun(executor, compare)
    try:
        return await comparing
    finally:
        batches.break_off()
        abandon(comparing)


class StreamedBatches:
    """The batches of a stream, pulled from the event loop by the thread that scores them.

    The next message is read when the thread needs it, so that gRPC's flow control slows the caller down. An
    `understudy.evaluator.evaluation.comparison.ReplayableBatches`.

    Args:
        incoming: The stream.
        loop: The event loop it belongs to.
        spools: Store batches.
        call: The call that the stream belongs to.
    """

    def __init__(self, incoming: Incoming, loop: asyncio.AbstractEventLoop, spools: Spools, call: CallContext) -> None:
        self._spools = spools
        self._call = call
        self._incoming = incoming
        self._loop = loop
        self._lock = threading.Lock()
        self._reading: Future[ZeroCopyMessage | None] | None = None
        self._closed = False
        self._spool: Spool | None = None

    @property
    def examples(self) -> int | None:
        """See `ReplayableBatches`."""
        return None

    def first(self, signature: Signature, *, keep: bool) -> Iterator[Batch]:
        """See `ReplayableBatches`."""
        del signature
        self._spool = self._spools.open(self._call.caller) if keep else None
        while (request := self._next_batch()) is not None:
            if self._spool is not None:
                self._spool.write(request.message)
            batches = [messages.batch(request.message)]
            del request
            weakref.finalize(batches[0], self._release).atexit = False
            yield batches.pop()  # nothing here keeps it while the next one is not asked for

    def again(self, signature: Signature) -> Iterator[Batch]:
        """See `ReplayableBatches`."""
        del signature
        if self._spool is None:
            raise RuntimeError("the batches were not kept")
        for message in self._spool.read():
            self._check_open()
            yield messages.batch(message)

    def close(self) -> None:
        """See `ReplayableBatches`."""
        if self._spool is not None:
            self._spool.close()

    def break_off(self) -> None:
        """Yield no more batches, as the call is over. On the event loop's thread."""
        with self._lock:
            self._closed = True
            if self._reading is not None:
                self._reading.cancel()

    def _next_batch(self) -> ZeroCopyMessage | None:
        with self._lock:
            self._check_open()
            reading = asyncio.run_coroutine_threadsafe(self._incoming.next_batch(), self._loop)
            self._reading = reading
        try:
            return reading.result()
        except FutureCancelledError:
            raise CancelledError("the caller went away") from None

    def _release(self) -> None:
        """Make room for other messages, as a batch is no longer in memory, on any thread."""
        with suppress(RuntimeError):  # the loop is closed, so nothing waits
            self._loop.call_soon_threadsafe(self._call.message_done)

    def _check_open(self) -> None:
        if self._closed:
            raise CancelledError("the caller went away")
