from __future__ import annotations

import socket
import threading
import time

import pytest

from testkit.ports import free_ports
from understudy.trainer import ClusterError, ClusterTask, ClusterTimeoutError
from understudy.trainer.rendezvous import wait_for_peers, wait_until_gone


def task(index: int, ports: list[int]) -> ClusterTask:
    return ClusterTask(role="worker", index=index, cluster={"worker": tuple(f"127.0.0.1:{port}" for port in ports)})


def test_a_task_listens_while_it_waits_and_returns_once_its_peer_is_there() -> None:
    ports = free_ports(2)
    over = threading.Event()

    def come_and_stay() -> None:
        wait_for_peers(task(1, ports), timeout_seconds=20.0)
        # As TensorFlow's server does.
        with socket.create_server(("127.0.0.1", ports[1])):
            over.wait(20.0)

    other = threading.Thread(target=come_and_stay)
    other.start()
    wait_for_peers(task(0, ports), timeout_seconds=20.0)
    with socket.create_server(("127.0.0.1", ports[0])):
        over.set()
        other.join(20.0)
    assert not other.is_alive()


def test_a_peer_that_never_comes_is_named() -> None:
    ports = free_ports(2)
    with pytest.raises(ClusterError, match=rf"waited 0.3 s .* worker 1 \(127.0.0.1:{ports[1]}\): Connection refused"):
        wait_for_peers(task(0, ports), timeout_seconds=0.3)


def test_an_address_that_does_not_resolve_is_named() -> None:
    (port,) = free_ports(1)
    lonely = ClusterTask(role="worker", index=0, cluster={"worker": (f"127.0.0.1:{port}", "no-such-host.invalid:2222")})
    with pytest.raises(ClusterError, match=r"worker 1 \(no-such-host.invalid:2222\)"):
        wait_for_peers(lonely, timeout_seconds=0.1)


def test_many_peers_that_do_not_answer_are_given_up_together() -> None:
    (port,) = free_ports(1)
    silent = [f"192.0.2.{number}:2222" for number in range(1, 31)]  # reserved for documentation: nobody answers
    lonely = ClusterTask(role="worker", index=0, cluster={"worker": (f"127.0.0.1:{port}", *silent)})
    began = time.monotonic()
    with pytest.raises(ClusterTimeoutError, match=r"worker 1 \(192.0.2.1:2222\): .*; worker 30 \(192.0.2.30:2222\): "):
        wait_for_peers(lonely, timeout_seconds=0.1)
    assert time.monotonic() - began < 15.0


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("", 0)) as taken:
        port = int(taken.getsockname()[1])
        with pytest.raises(ClusterError, match=rf"worker 0 .* cannot listen on port {port}"):
            wait_for_peers(task(0, [port, 1]), timeout_seconds=0.1)


def test_the_last_to_leave_waits_until_the_others_have_gone() -> None:
    ports = free_ports(2)
    chief = task(0, ports)
    other = socket.create_server(("127.0.0.1", ports[1]))
    assert not wait_until_gone(chief, timeout_seconds=0.1)
    leaving = threading.Timer(0.1, other.close)
    leaving.start()
    assert wait_until_gone(chief, timeout_seconds=20.0)
    leaving.join()
