"""The program that inspects files: it reads requests from standard input, one JSON object a line, and answers each.

A file is parsed in a fork of this process, which has limits: a file may crash, stop or exhaust whatever parses it.
The libraries are imported once, here, so that a fork costs milliseconds. TensorFlow is not imported, but the classes of
its messages are, which need only protobuf.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from understudy.checkpoints.checkpoint_errors import MACHINE_ERRNOS
from understudy.checkpoints.inspection.limits import Limits
from understudy.compat import data_type_name, parse_bundle_entry, parse_saved_model

_LONGEST_TEXT = 2000
_LARGEST_ANSWER_BYTES = 2**26
_MACHINES = MACHINE_ERRNOS | {errno.ENOENT}
"""The errors that say nothing about the file. ENOMEM is not one of them: the limit of the fork causes it."""


def main() -> None:
    """Answer requests until standard input ends."""
    prepare()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer = run_limited(lambda request=request: inspect(request), Limits(**request["limits"]))  # type: ignore[misc]
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def prepare() -> None:
    """Import what the forks need."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is not None and "tensorflow" not in sys.modules:
        package = ModuleType("tensorflow")
        package.__path__ = list(spec.submodule_search_locations or ())
        sys.modules["tensorflow"] = package
    parse_saved_model(b"")
    data_type_name(parse_bundle_entry(b"").dtype)
    from understudy.checkpoints.inspection import archive, graph  # noqa: F401


def inspect(request: dict[str, Any]) -> dict[str, Any]:
    """Inspect the file of a request."""
    from understudy.checkpoints.inspection.archive import inspect_archive
    from understudy.checkpoints.inspection.bundle import inspect_bundle
    from understudy.checkpoints.inspection.graph import inspect_saved_model
    from understudy.checkpoints.inspection.hdf5 import inspect_hdf5
    from understudy.checkpoints.kinds import ModelKind

    path, kind, content = Path(request["path"]), ModelKind(request["kind"]), bool(request["content"])
    if kind is ModelKind.KERAS:
        return inspect_archive(path, content=content)
    if kind is ModelKind.SAVED_MODEL:
        return inspect_saved_model(path)
    if kind is ModelKind.TF_CHECKPOINT:
        inspect_bundle(path)
        return {}
    return inspect_hdf5(path, whole_model=kind is ModelKind.HDF5, content=content)


def run_limited(work: Callable[[], dict[str, Any]], limits: Limits) -> bytes:
    """Run work in a fork and return a JSON object: its result as ``found``, or why there is none.

    That is ``damage``, a text; ``machine``, an error number and a text; or ``signal``, the number of the one that ended
    the fork.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer(work, limits, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read(_LARGEST_ANSWER_BYTES)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return json.dumps({"signal": os.WTERMSIG(status)}).encode()
    return answer or json.dumps({"damage": "reading it ended without a result"}).encode()


def _answer(work: Callable[[], dict[str, Any]], limits: Limits, writer: int) -> None:
    """Do the work of a fork, and end it."""
    try:
        limits.apply()
        try:
            answer: dict[str, Any] = {"found": work()}
        except MemoryError:
            answer = {"damage": f"reading it takes more than {limits.memory_bytes} bytes of memory"}
        except Exception as error:  # noqa: BLE001 - libraries raise anything for damaged files
            number = error.errno if isinstance(error, OSError) else None
            text = str(error) or type(error).__name__
            answer = {"machine": [number, text]} if number in _MACHINES else {"damage": text[:_LONGEST_TEXT]}
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's, for the group; the owner ends this
        signal.signal(number, signal.SIG_IGN)
    main()
