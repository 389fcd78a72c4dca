"""Has a program run by the server of `tests/startup/preloaded.py`.

Every Python that hands over imports this module, and so it imports little.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import sys

INSPECTION = ["-P", "-m", "understudy.checkpoints.inspection.worker"]
"""The program that the server of inspections runs."""

NAMESPACES = ("/proc/self/ns/net", "/proc/self/ns/mnt")
"""The namespaces of a process that a program may have for itself; see `testkit.hosts`."""

INSPECTIONS = ".inspections"
"""What the address of the server of inspections adds to the other's."""

FORK_NAME = "for {}"
"""The name of the process that runs the program of the one with this id."""

_SUPERVISOR = "UNDERSTUDY_SUPERVISOR_PID"
"""The environment variable by which a program knows that it must end with its parent; see `_end_with_parent`."""

_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def hand_over(address: str) -> None:
    """Have the server run this process's program, and end as it ends.

    Returns only if the program is no module, file or text, or has options for Python and is not `INSPECTION`.
    """
    program = sys.orig_argv[1:]
    if program == INSPECTION:
        address += INSPECTIONS
    elif not program or (program[0].startswith("-") and program[0] not in ("-m", "-c")):
        return
    environment = dict(os.environ)
    if environment.pop(_SUPERVISOR, None) is not None:
        _end_with_parent()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    folder = os.getcwd()  # noqa: PTH109 - pathlib takes long to import
    request = {"program": program, "environment": environment, "folder": folder}
    namespaces = [os.open(each, os.O_RDONLY) for each in NAMESPACES]
    socket.send_fds(connection, [marshal.dumps(request)], [0, 1, 2, *namespaces])
    for number in _FORWARDED:
        signal.signal(number, lambda came, _: connection.send(bytes([came])))
    status = int(connection.recv(16))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, and so the fork: its own parent is the server."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
