"""Hosts with their own addresses: network namespaces of this machine, connected by a switch."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_SUBNET = "10.77.0"
_SECONDS = 60
_FILES = Path("/etc/netns")
"""Where `ip` looks for the files of a namespace, which replace those of /etc."""

_IP = shutil.which("ip")


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        address: Its IP address, which the other hosts reach.
        inside: The beginning of a command line that runs on it.
    """

    address: str
    inside: Sequence[str]


@contextlib.contextmanager
def connected_hosts(count: int, *, host_names: Sequence[str] = ()) -> Iterator[list[Host]]:
    """Create some hosts and remove them after the block. Skip the test if the system does not allow it.

    Args:
        count: The number of hosts.
        host_names: What each of them is called on all of them, if they have names.
    """
    if _IP is None:
        pytest.skip("there is no `ip` here to make network namespaces with; it is in the package iproute2")
    switch = f"understudy-{os.getpid()}"
    names = [f"{switch}-{index}" for index in range(count)]
    with contextlib.ExitStack() as stack:
        try:
            for name in (switch, *names):
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "delete", name)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for index, name in enumerate(names):
                _plug_in(switch, f"port{index}", name, f"{_SUBNET}.{index + 1}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: `{' '.join(error.cmd)}`: {error.stderr.strip()}")
        if host_names:
            table = "".join(f"{_SUBNET}.{index + 1} {host}\n" for index, host in enumerate(host_names))
            for name in names:
                stack.callback(shutil.rmtree, _FILES / name)
                (_FILES / name).mkdir(parents=True)
                (_FILES / name / "hosts").write_text(f"127.0.0.1 localhost\n{table}", encoding="utf-8")
        yield [Host(f"{_SUBNET}.{index + 1}", ("ip", "netns", "exec", name)) for index, name in enumerate(names)]


def _plug_in(switch: str, port: str, name: str, address: str) -> None:
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")
    _ip("-n", name, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    subprocess.run([_IP or "ip", *arguments], check=True, capture_output=True, text=True, timeout=_SECONDS)
