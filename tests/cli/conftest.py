"""A peer server for the commands, and a way to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result

from testkit.peer_server import Peer, Script
from understudy.cli.main import main

Run = Callable[..., Result]


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as running:
        yield running


@pytest.fixture
def script(peer: Peer) -> Script:
    return peer.script


@pytest.fixture
def run(peer: Peer) -> Run:
    """Run ``understudy`` with arguments against the peer server."""

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(main, arguments, env={"UNDERSTUDY_TARGET": peer.target})

    return invoke
