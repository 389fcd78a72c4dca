"""Generates the Python modules of the ``.proto`` files in ``understudy/`` beside them, with their types.

Run by the builds of both distributions. The modules of ``third_party/`` come with googleapis-common-protos.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent


def main() -> None:
    """Generate every module; raise SystemExit if protoc refuses a file."""
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    arguments = [
        "protoc",
        f"--proto_path={ROOT}",
        f"--proto_path={ROOT / 'third_party'}",
        f"--proto_path={Path(protoc.__file__).parent / '_proto'}",
        f"--python_out={ROOT}",
        f"--grpc_python_out={ROOT}",
        f"--mypy_out=quiet:{ROOT}",
        f"--mypy_grpc_out=quiet:{ROOT}",
        *sorted(str(path) for path in (ROOT / "understudy").rglob("*.proto")),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc could not compile the protocol; its messages are above")


if __name__ == "__main__":
    main()
