"""The process of a worker of `understudy.evaluator.sharding.local_pool`: it has a socket as standard input."""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from understudy.evaluator.sharding.worker import ShardWorker, is_permanent


def serve(connection: Connection[Any, Any]) -> None:
    """Receive the work, then shards, and send the facts, then ``(index, result)``, or an error.

    Returns when the other side has closed the connection.
    """
    try:
        worker = ShardWorker(connection.recv())
        connection.send(worker.facts)
        while True:
            shard = connection.recv()
            connection.send((shard.index, worker.compute(shard)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        if not is_permanent(error):
            raise
        connection.send(error)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the owner ends its workers
    serve(Connection(sys.stdin.fileno()))
