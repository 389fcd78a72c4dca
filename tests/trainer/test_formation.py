"""Workers whose cluster does not come together, or is disturbed while it does."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from testkit.ports import free_ports
from testkit.preloading import VARIABLE
from testkit.training_harness import Task, leave_none, start_training, tf_config
from understudy.checkpoints import RunDir

pytestmark = pytest.mark.long

CLUSTER_TIMEOUT = 7
PREEMPTED = 143
SECONDS = 150.0
OPTIONS = ("--steps", "4", "--no-tensorboard", "--strategy", "multi_worker")

_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


@contextlib.contextmanager
def worker(
    index: int, ports: list[int], run_dir: Path, *options: str, verb: str = "train", **environ: str
) -> Iterator[Task]:
    """Start one worker of a cluster; it does not outlive the block."""
    spec = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    environ = {"TF_CONFIG": tf_config(spec, "worker", index), **environ}
    task = start_training("Linear", run_dir, *OPTIONS, *options, environ=environ, verb=verb)
    try:
        yield task
    finally:
        leave_none([task])


def await_tensorflow(port: int) -> None:
    """Return once TensorFlow's server answers there; what listens there earlier accepts calls, but never answers."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.2) as call:
            call.sendall(_HTTP2_GREETING)
            if call.recv(1):
                return
        time.sleep(0.05)
    raise AssertionError(f"no TensorFlow on port {port} within {SECONDS:g} s")


def await_listener(port: int) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.2):
            return
        time.sleep(0.05)
    raise AssertionError(f"nobody listens on port {port} within {SECONDS:g} s")


def test_a_task_that_is_seen_but_does_not_join_is_given_up_and_named(tmp_path: Path) -> None:
    ports = free_ports(2)
    # As a task that was killed right after it was seen.
    with (
        socket.create_server(("127.0.0.1", ports[1])),
        worker(0, ports, tmp_path, "--cluster-timeout-seconds", "3") as leader,
    ):
        assert leader.end() == CLUSTER_TIMEOUT, leader.errors
    assert "could not be joined in 3 s: missing are worker 1; start every task again" in leader.errors


def test_a_task_that_never_comes_is_given_up_with_a_status_to_start_again_for(tmp_path: Path) -> None:
    ports = free_ports(2)
    with worker(1, ports, tmp_path, "--cluster-timeout-seconds", "0.5") as other:
        assert other.end() == CLUSTER_TIMEOUT, other.errors
    assert f"missing are worker 0 (127.0.0.1:{ports[0]})" in other.errors


def test_sigterm_while_tensorflow_joins_the_cluster_ends_all_tasks_before_the_first_step(tmp_path: Path) -> None:
    ports = free_ports(2)
    seen = socket.create_server(("127.0.0.1", ports[1]))
    with seen, worker(0, ports, tmp_path) as leader:
        await_tensorflow(ports[0])
        # TensorFlow's own handler is in place now, and ours is not.
        leader.process.terminate()
        seen.close()
        with worker(1, ports, tmp_path) as other:
            assert (leader.end(), other.end()) == (PREEMPTED, PREEMPTED), leader.errors + other.errors
    assert "asked to end by SIGTERM before the first step" in other.errors
    assert RunDir(tmp_path).committed_steps() == []


def test_sigterm_ends_the_wait_for_the_other_tasks(tmp_path: Path) -> None:
    ports = free_ports(2)
    with worker(0, ports, tmp_path) as leader:
        await_listener(ports[0])
        leader.process.terminate()
        assert leader.end() == PREEMPTED, leader.errors
    assert "before the cluster formed" in leader.errors


def test_a_task_dies_with_its_supervisor(tmp_path: Path) -> None:
    ports = free_ports(2)
    by_itself = {VARIABLE: ""}  # from what is preloaded, it would end for another reason
    with worker(0, ports, tmp_path, "--restarts", "3", verb="run", **by_itself) as supervisor:
        await_listener(ports[0])
        (child,) = psutil.Process(supervisor.process.pid).children()
        supervisor.kill()
        gone, _ = psutil.wait_procs([child], timeout=SECONDS)
        assert gone == [child]
