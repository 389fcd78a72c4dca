"""The request log: a sample of live requests in files that ``--eval-data`` takes, bounded in size and in age.

A file holds the requests of up to a minute. It is written under a temporary name, synced and renamed, so that a process
that is killed leaves whole files. No name in a request becomes part of a path.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from understudy.checkpoints.atomic import sync
from understudy.checkpoints.locks import DirectoryLock
from understudy.evaluator.datasets.request_records import LoggedRequest, encode_request, redacted
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.types import Arrays

PREFIX: Final = "requests-"
SUFFIX: Final = ".tfrecord"
TEMPORARY_SUFFIX: Final = ".part"

FLUSH_SECONDS: Final = 60.0
"""The most seconds of requests that a killed process loses."""
LARGEST_FILE: Final = 16 * 1024 * 1024
FILES_WITHIN_BOUND: Final = 8
"""A file holds at most this part of all that the log may take, so that removing the oldest keeps most."""

_RECORD_BYTES: Final = 16
"""What a TFRecord file adds to each record: its length and two checksums."""

_log = logging.getLogger(__name__)


class RequestLogObserver(Protocol):
    """Counts what becomes of the sampled requests. Methods must not raise."""

    def written(self, requests: int) -> None:
        """Requests are in a file."""

    def dropped(self, reason: str, requests: int = 1) -> None:
        """Requests are lost: the ``disk`` failed, they are ``too_large``, or an input of a ``redaction`` lacks."""

    def size_changed(self, size: int) -> None:
        """The files now take this many bytes."""


@dataclass(frozen=True, kw_only=True)
class RequestLogOptions:
    """What is kept.

    Attributes:
        folder: The folder of the files.
        max_bytes: The most that all files may take.
        max_age_seconds: The age at which a file is removed.
        redact: The names of inputs whose values are replaced.
    """

    folder: Path
    max_bytes: int
    max_age_seconds: float
    redact: Sequence[str] = ()


class RequestLog:
    """Writes requests to files, for one thread at a time.

    Args:
        options: What is kept.
        observer: Counts what becomes of the requests.
        targets_of: Returns the targets of a request by the names of outputs, ``[examples, ...]``; None for the answers.
        clock: Returns the time in seconds since the epoch.
        monotonic: Monotonic clock, in seconds.

    Raises:
        ConfigurationError: The folder cannot be written to.
        understudy.checkpoints.checkpoint_errors.LockHeldError: Another service uses the folder.
    """

    def __init__(
        self,
        options: RequestLogOptions,
        observer: RequestLogObserver,
        *,
        targets_of: Callable[[LoggedRequest], Arrays] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._observer = observer
        self._targets_of = targets_of
        self._clock = clock
        self._monotonic = monotonic
        self._records: list[bytes] = []
        self._requests = 0
        self._bytes = 0
        self._since = 0.0
        self._removes_at = 0.0
        self._told: set[str] = set()
        self._file_bytes = min(LARGEST_FILE, options.max_bytes // FILES_WITHIN_BOUND)
        self._lock = DirectoryLock(options.folder, alternative="give another folder with --request-log")
        try:
            options.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock.acquire()
            self._remove_unfinished()
            self._make_room(0)
        except OSError as error:
            self._lock.release()
            raise ConfigurationError(
                f"--request-log {options.folder} cannot be written to: {error.strerror}; give a folder that can"
            ) from error

    def take(self, request: LoggedRequest) -> None:
        """Add a request to the current file, and write the file if it is large or old enough."""
        missing = [name for name in self._options.redact if name not in request.inputs]
        if missing:
            self._drop(
                "redaction",
                1,
                f"requests have no input {missing[0]!r} to redact; they have {', '.join(map(repr, request.inputs))}",
            )
            return
        names = tuple(self._options.redact)
        safe = request._replace(inputs=redacted(request.inputs, names)) if names else request
        targets = None if self._targets_of is None else self._targets_of(request)
        records = encode_request(safe, targets=targets, redacted_names=names)
        size = sum(map(len, records)) + _RECORD_BYTES * len(records)
        if size > self._file_bytes:
            self._drop(
                "too_large",
                1,
                f"a request of {size} bytes is larger than a file, {self._file_bytes} bytes; raise --request-log-mib",
            )
            return
        if self._bytes + size > self._file_bytes:
            self._flush()
        if not self._records:
            self._since = self._monotonic()
        self._records += records
        self._requests += 1
        self._bytes += size
        self.tick()

    def tick(self) -> None:
        """Write the current file if it is old enough, and once in a while remove files that are too old."""
        now = self._monotonic()
        if self._records and now - self._since >= FLUSH_SECONDS:
            self._flush()
        if now >= self._removes_at:
            self._removes_at = now + FLUSH_SECONDS
            self._remove_old(self._clock() - self._options.max_age_seconds)

    def close(self) -> None:
        """Write what there is, and give the folder free."""
        self._flush()
        self._lock.release()

    def _flush(self) -> None:
        if not self._records:
            return
        records, requests, size = self._records, self._requests, self._bytes
        self._records, self._requests, self._bytes = [], 0, 0
        try:
            self._make_room(size)
            self._write(records)
        except OSError as error:
            self._drop("disk", requests, f"cannot write to {self._options.folder}: {error.strerror or error}")
            return
        self._told.discard("disk")
        self._observer.written(requests)

    def _write(self, records: Sequence[bytes]) -> None:
        now = self._clock()
        name = f"{PREFIX}{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}-{time.time_ns() % 10**9:09d}{SUFFIX}"
        temporary = self._options.folder / f"{name}{TEMPORARY_SUFFIX}"
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
            write_records(temporary, records)
            sync(temporary)
            temporary.replace(self._options.folder / name)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync(self._options.folder)
        self._observer.size_changed(sum(size for _, size, _ in self._files()))

    def _make_room(self, size: int) -> None:
        """Remove the oldest files until so many bytes more are within the bound."""
        files = self._files()
        total = sum(each for _, each, _ in files)
        for path, each, _ in files:
            if total + size <= self._options.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= each
        self._observer.size_changed(total)

    def _remove_old(self, oldest: float) -> None:
        with suppress(OSError):
            for path, _, written_at in self._files():
                if written_at < oldest:
                    path.unlink(missing_ok=True)

    def _files(self) -> list[tuple[Path, int, float]]:
        """Return the whole files with their sizes and times of writing, the oldest first."""
        found = []
        for path in sorted(self._options.folder.glob(f"{PREFIX}*{SUFFIX}")):
            with suppress(FileNotFoundError):
                status = path.lstat()
                found.append((path, status.st_size, status.st_mtime))
        return found

    def _remove_unfinished(self) -> None:
        """Remove what a killed process left; the lock keeps the files of a living one from this."""
        for path in self._options.folder.glob(f"{PREFIX}*{TEMPORARY_SUFFIX}"):
            path.unlink(missing_ok=True)

    def _drop(self, reason: str, requests: int, message: str) -> None:
        """Count dropped requests, and say why once until it works again."""
        self._observer.dropped(reason, requests)
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("sampled requests are not logged: %s", message)


def write_records(path: Path, records: Sequence[bytes]) -> None:
    """Write a TFRecord file over an existing one, whose permissions stay.

    Raises:
        OSError: It cannot be written.
    """
    import tensorflow as tf

    try:
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in records:
                writer.write(record)
    except tf.errors.OpError as error:
        raise OSError(str(error)) from error
