"""The calls of a server that follows an evaluator."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Final

from understudy.clients.client_errors import translated
from understudy.clients.model_calls import ModelCalls, ended
from understudy.v1 import fleet_pb2

_CONNECT_SECONDS: Final = 3
"""How long a connection may take before the next address is tried."""


class FleetCalls(ModelCalls):
    """Follows one evaluator; see `ModelCalls` and `Client` for its arguments. Thread-safe."""

    def follow(self, requests: Iterator[fleet_pb2.FollowRequest]) -> Generator[fleet_pb2.FollowResponse, None, None]:
        """Yield the present decision and each later one, until the evaluator ends the stream.

        Args:
            requests: Who follows, and what it serves; iterated on another thread, which goes on until it ends.
        """
        call = self._begun(self._fleet.Follow, requests, {})
        with ended(call), translated():
            yield from call

    def read_checkpoint(self, *, step: int, digest: str, path: str, offset: int = 0) -> Generator[bytes, None, None]:
        """Yield the rest of a file of a checkpoint, from an offset on."""
        request = fleet_pb2.ReadCheckpointRequest(
            model_name=self._requests.model_name, step=step, digest=digest, path=path, offset=offset
        )
        call = self._begun(self._fleet.ReadCheckpoint, request, {})
        with ended(call), translated():
            for response in call:
                yield response.content


def fleet_options(server_name: str | None) -> list[tuple[str, Any]]:
    """Return the options of a channel to an evaluator.

    Args:
        server_name: The name in the evaluator's certificate; that of the address by default.
    """
    options: list[tuple[str, Any]] = [("grpc.min_reconnect_backoff_ms", _CONNECT_SECONDS * 1000)]
    return [*options, *([("grpc.ssl_target_name_override", server_name)] if server_name else [])]
