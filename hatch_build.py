"""Generates the gRPC stubs when a wheel or an editable install is built."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProtocHook(BuildHookInterface[Any]):
    """Runs protoc over ``proto/understudy/`` and writes modules and type stubs beside the ``.proto`` files.

    The modules of the files in ``proto/third_party/`` come with googleapis-common-protos.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate every stub; raise if protoc refuses a file."""
        from grpc_tools import protoc

        scripts = sysconfig.get_path("scripts")
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
        root = Path(self.root).resolve() / "proto"
        sources = sorted(str(path) for path in (root / "understudy").rglob("*.proto"))
        well_known = Path(protoc.__file__).parent / "_proto"
        arguments = [
            "protoc",
            f"--proto_path={root}",
            f"--proto_path={root / 'third_party'}",
            f"--proto_path={well_known}",
            f"--python_out={root}",
            f"--grpc_python_out={root}",
            f"--mypy_out=quiet:{root}",
            f"--mypy_grpc_out=quiet:{root}",
            *sources,
        ]
        if protoc.main(arguments) != 0:
            raise RuntimeError(f"protoc could not compile {', '.join(sources)}; its messages are above")
