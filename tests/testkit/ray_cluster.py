"""A Ray cluster of several nodes on this machine, which listens on the loopback interface alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from testkit.ports import free_ports

ENVIRONMENT: Mapping[str, str] = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "ab" * 32,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # only loopback
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
"""The variables of a cluster and of the processes that call it. Ray reads them once, when it is imported."""

_END_SECONDS = 30.0
_STARTS = 3


class RayCluster:
    """A head and further nodes of one CPU each. For one thread.

    Args:
        folder: Where the nodes put their files; a short path, as those of sockets are below it. RAY_TMPDIR must be the
            same.
    """

    def __init__(self, folder: str) -> None:
        assert os.environ["RAY_TMPDIR"] == folder
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self._folder = Path(folder)
        self._node = {
            "num_cpus": 1,
            "object_store_memory": 100 * 2**20,
            "include_dashboard": False,
            "include_log_monitor": False,
            "node_ip_address": "127.0.0.1",
        }
        self._head = {**self._node, "temp_dir": folder, "gcs_server_port": port, "no_monitor": True}
        self._cluster: Any = None

    @property
    def further_nodes(self) -> int:
        """The number of nodes besides the head."""
        return len(self._cluster.worker_nodes)

    def start(self) -> None:
        """Start the head, at the same address each time; again where Ray gave up, as it does on a busy machine."""
        from ray.cluster_utils import Cluster

        (self._folder / "ray").mkdir(exist_ok=True)  # for the file of the head's address
        before = _processes_of_ray()
        for attempt in range(_STARTS):
            try:
                self._cluster = Cluster(initialize_head=True, head_node_args=self._head)
                break
            except Exception:  # Ray raises a bare Exception, and OSError for its files
                _kill(_processes_of_ray() - before)
                if attempt == _STARTS - 1:
                    raise
        assert self._cluster.address == self.address

    def join(self) -> None:
        """Add a node."""
        self._cluster.add_node(**self._node)

    def remove(self, preferred: Sequence[str] = ()) -> str:
        """Kill all processes of a node, the first with one of these ids if there is one; return its id."""
        places = {node: place for place, node in enumerate(preferred)}
        node = min(self._cluster.worker_nodes, key=lambda each: places.get(each.node_id, len(places)))
        self._cluster.remove_node(node, allow_graceful=False)
        return str(node.node_id)

    def end(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


@contextmanager
def running(nodes: int) -> Iterator[RayCluster]:
    """Start a cluster of so many nodes. None of its processes and files is left afterwards.

    The variables of `ENVIRONMENT` must be set.
    """
    assert ENVIRONMENT.items() <= os.environ.items()
    before = _processes_of_ray()
    folder = tempfile.mkdtemp(prefix="ray-")
    try:
        with mock.patch.dict(os.environ, RAY_TMPDIR=folder):
            cluster = RayCluster(folder)
            cluster.start()
            for _ in range(nodes - 1):
                cluster.join()
            yield cluster
    finally:
        started = _processes_of_ray() - before
        with contextlib.suppress(AttributeError):  # it was not started
            cluster.end()
        deadline = time.monotonic() + _END_SECONDS
        while (left := [process for process in started if _runs(process)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        _kill(left)
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, left


def _processes_of_ray() -> set[psutil.Process]:
    return {process for process in psutil.Process().children(recursive=True) if _is_of_ray(process)}


def _kill(processes: Collection[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_END_SECONDS)


def _is_of_ray(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "site-packages/ray/" in command or command.startswith("ray::")


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
