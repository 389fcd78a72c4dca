"""Waits, in bounded time, for the other tasks of a cluster to arrive and to leave, and names the missing ones.

TensorFlow's own wait holds Python's interpreter lock, does not name the missing tasks, and lasts up to an hour. So
before a task joins, it listens on its own port and calls every peer until each has answered once: either a listener
like this one, or the TensorFlow server of a peer that is further ahead.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from understudy.trainer.tf_config import ClusterTask, Peer
from understudy.trainer.trainer_errors import ClusterError, ClusterTimeoutError

_PAUSE_SECONDS = 0.1
_CONNECT_SECONDS = 1.0
_CALLS_AT_ONCE = 32
_NOT_PROXIED = "no_grpc_proxy"
"""The variable with the hosts that gRPC calls directly. Without it gRPC takes ``no_proxy``."""


def bypass_proxies(task: ClusterTask) -> None:
    """Have TensorFlow call the tasks of a cluster directly, also where the environment names a proxy.

    Otherwise gRPC would ask the proxy for a tunnel to each task, and try without end if it gets none.
    """
    hosts = [_split(address)[0] for addresses in task.cluster.values() for address in addresses]
    excepted = os.environ.get(_NOT_PROXIED) or os.environ.get("no_proxy", "")
    os.environ[_NOT_PROXIED] = ",".join(filter(None, dict.fromkeys([*excepted.split(","), *hosts])))


def wait_for_peers(
    task: ClusterTask,
    *,
    timeout_seconds: float,
    peers: Sequence[Peer] | None = None,
    while_waiting: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return when all peers, by default every other synchronous training task, have just been seen.

    Args:
        task: This task.
        timeout_seconds: How long to wait for them.
        peers: The tasks to wait for.
        while_waiting: Called periodically; may raise to end the wait.
        clock: Seconds from any origin, never going back.

    Raises:
        ClusterTimeoutError: Some did not arrive in time. The text names them.
        ClusterError: This task's own port is in use.
    """
    me = next(peer for peer in task.trainers if (peer.role, peer.index) == (task.role, task.index))
    others = [peer for peer in (task.trainers if peers is None else peers) if peer != me]
    deadline = clock() + timeout_seconds
    with _listen(me):
        missing: Iterable[Peer] = others
        # Finally all of them once more, as one that answered may have died meanwhile.
        while failures := _call(missing) or _call(others):
            missing = failures
            while_waiting()
            if clock() >= deadline:
                who = "; ".join(f"{peer}: {reason}" for peer, reason in failures.items())
                raise ClusterTimeoutError(
                    f"waited {timeout_seconds:g} s for the rest of the cluster; missing are {who}"
                )
            time.sleep(_PAUSE_SECONDS)


def wait_until_gone(task: ClusterTask, *, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> bool:
    """Wait until no other synchronous training task listens any more, or the time is up; return whether all left."""
    others = [peer for peer in task.trainers if (peer.role, peer.index) != (task.role, task.index)]
    deadline = clock() + timeout_seconds
    while len(_call(others)) < len(others):
        if clock() >= deadline:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


def _listen(me: Peer) -> socket.socket:
    port = _split(me.address)[1]
    try:
        return socket.create_server(("", port), backlog=128)
    except OSError as error:
        raise ClusterError(f"{me} cannot listen on port {port}: {error.strerror}; is another task running?") from error


def _call(peers: Iterable[Peer]) -> dict[Peer, str]:
    """Call each peer once, many at a time; return the errors of those that did not answer."""
    called = list(peers)
    with ThreadPoolExecutor(max(1, min(len(called), _CALLS_AT_ONCE))) as pool:
        answers = zip(called, pool.map(_failure, called), strict=True)
        return {peer: failure for peer, failure in answers if failure is not None}


def _failure(peer: Peer) -> str | None:
    """Call a peer; return the error if it did not answer, else None."""
    try:
        socket.create_connection(_split(peer.address), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
