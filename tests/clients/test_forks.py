"""A client in a server that forks its workers, such as gunicorn with --preload, or multiprocessing."""

from __future__ import annotations

import subprocess
import sys

from testkit.peer_server import STEP, Peer

TIMEOUT_SECONDS = 60

PROGRAM = """
import os, signal, sys
import numpy as np
from understudy.clients import Client

client = Client(sys.argv[1], timeout_seconds=20)
step = client.predict(np.ones((1, 4), np.float32)).step
child = os.fork()
if child == 0:
    signal.alarm(30)  # a child that hangs ends, too
    os._exit(0 if client.predict(np.ones((1, 4), np.float32)).step == step else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), client.predict(np.ones((1, 4), np.float32)).step)
"""


def test_a_client_that_was_created_before_a_fork_works_in_the_child_and_in_the_parent(peer: Peer) -> None:
    program = [sys.executable, "-c", PROGRAM, peer.target]

    ended = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True)

    assert ended.stdout.split() == ["0", str(STEP)]
