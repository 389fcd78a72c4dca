"""Callers that begin many large bodies and end none, against a whole server."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import h2.config
import h2.connection
import h2.events
import numpy as np
import psutil
import pytest

from testkit.front_ends import FRONT_ENDS
from testkit.in_process import until
from testkit.served import plain_model, publish, serving
from testkit.values import WIDTH
from understudy.clients import Client

SECONDS = 30.0
MIB = 1 << 20
BODY_MIB = 32
BODY_BYTES = 4 * MIB
CONNECTIONS, STREAMS = 4, 20
SLACK_MIB = 120
"""Envoy's and Python's own buffers; without a bound, the bodies alone take 320 MiB."""


class Hostile:
    """An HTTP/2 connection that sends the beginnings of bodies."""

    def __init__(self, address: str, path: str) -> None:
        host, port = address.rsplit(":", 1)
        self._path = path
        self._socket = socket.create_connection((host, int(port)), SECONDS)
        self._http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self._http.initiate_connection()
        self._unsent: dict[int, int] = {}
        self.refused = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def begin(self, size: int) -> None:
        """Begin a call whose message is longer than the ``size`` bytes that will be sent."""
        stream = self._http.get_next_available_stream_id()
        fields = {":method": "POST", ":scheme": "http", ":path": self._path, ":authority": "x"}
        fields |= {"content-type": "application/grpc", "te": "trailers"}
        self._http.send_headers(stream, list(fields.items()))
        self._http.send_data(stream, b"\0" + (size + 1).to_bytes(4, "big"))
        self._unsent[stream] = size

    def push(self) -> int:
        """Send what flow control admits; return how many bytes of open bodies are still unsent."""
        for stream in list(self._unsent):
            while self._unsent[stream] and (room := self._http.local_flow_control_window(stream)):
                size = min(self._unsent[stream], room, self._http.max_outbound_frame_size)
                self._http.send_data(stream, bytes(size))
                self._unsent[stream] -= size
        self._socket.sendall(self._http.data_to_send())
        self._socket.settimeout(0.01)
        with suppress(TimeoutError):
            for event in self._http.receive_data(self._socket.recv(65536)):
                if isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                    self.refused += self._unsent.pop(event.stream_id, None) is not None
        self._socket.settimeout(SECONDS)
        return sum(self._unsent.values())


@pytest.mark.parametrize("front_end", FRONT_ENDS[1:])
def test_unfinished_bodies_hold_bounded_memory_and_a_caller_is_answered(tmp_path: Path, front_end: str) -> None:
    publish(tmp_path, {2: plain_model(2)})
    flags = ("--max-message-mib", "16", "--max-body-mib", str(BODY_MIB), "--frontend", front_end)
    with serving(tmp_path, "plain", *flags) as served, Client(served.grpc, timeout_seconds=SECONDS) as client:
        inputs = {"x": np.ones((1, WIDTH), np.float32)}
        assert client.predict(inputs).step == 2
        process = psutil.Process(served.pid)
        before = process.memory_info().rss
        with ExitStack() as stack:
            path = "/understudy.v1.PredictionService/Predict"
            hostile = [stack.enter_context(Hostile(served.grpc, path)) for _ in range(CONNECTIONS)]
            for each in hostile:
                for _ in range(STREAMS):
                    each.begin(BODY_BYTES)
            until(lambda: sum(each.push() for each in hostile) == 0)
            assert sum(each.refused for each in hostile) >= CONNECTIONS * STREAMS - BODY_MIB * MIB // BODY_BYTES
            assert client.predict(inputs).step == 2
            assert process.memory_info().rss - before < (BODY_MIB + SLACK_MIB) * MIB
        assert client.predict(inputs).step == 2
