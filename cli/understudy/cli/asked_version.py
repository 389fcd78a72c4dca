"""A version of a server that a command asks, apart from live requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from understudy.clients import Client, Version
    from understudy.clients.replaying import Replay
    from understudy.evaluator.types import Arrays


class AskedVersion:
    """A version that answers batches. It holds a slot of the server from the first batch on until `release`.

    A label stands for the same step all the time. If the server needs the slot for a checkpoint meanwhile, the version
    is loaded again. The timeout is that of a batch, though all that are answered until `release` are one call.

    Args:
        client: The server.
        version: The version, which is loaded at once to be described.

    Attributes:
        model: Describes the version.
    """

    def __init__(self, client: Client, version: Version) -> None:
        self._client = client
        self._stream = ExitStack()
        self._replay: Replay | None = None
        self.model = self._opened(version).model
        self.release()

    @classmethod
    @contextmanager
    def of(cls, client: Client, version: Version) -> Iterator[Self]:
        """Yield the version, and release it at the end."""
        asked = cls(client, version)
        try:
            yield asked
        finally:
            asked.release()

    def predict(self, inputs: Arrays) -> Arrays:
        """Return the outputs for one batch."""
        from understudy.clients import AbortedError, DeadlineExceededError, UnavailableError

        try:
            return self._present().predict(inputs).outputs
        except (AbortedError, DeadlineExceededError, UnavailableError):
            self.release()
            return self._present().predict(inputs).outputs

    def release(self) -> None:
        """Let another version have the slot until the next batch."""
        self._replay = None
        self._stream.close()

    def _present(self) -> Replay:
        return self._replay or self._opened(self.model.step)

    def _opened(self, version: Version) -> Replay:
        self._replay = self._stream.enter_context(self._client.replay(version=version))
        return self._replay
