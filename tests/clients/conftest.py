"""A peer server, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from testkit.peer_server import Peer, Script
from understudy.clients import AsyncClient, Client


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as running:
        yield running


@pytest.fixture
def script(peer: Peer) -> Script:
    return peer.script


@pytest.fixture
def client(peer: Peer) -> Iterator[Client]:
    with Client(peer.target, timeout_seconds=20, stream_timeout_seconds=20) as connected:
        yield connected


@pytest_asyncio.fixture
async def async_client(peer: Peer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(peer.target, timeout_seconds=20, stream_timeout_seconds=20) as connected:
        yield connected
