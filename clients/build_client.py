"""Builds `understudy-client` from this folder and ``proto/``: beside it in a clone, inside it in an sdist."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGES = ("understudy/v1", "understudy/wire")


class ClientHook(BuildHookInterface[Any]):
    """Includes the packages of ``proto/`` that the clients need."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Choose the files of one build, and generate the gRPC stubs for a wheel."""
        if version == "editable":
            raise RuntimeError("install the whole project instead, as `make setup` does: pip install -e .")
        root = Path(self.root)
        proto = next(folder for folder in (root / "proto", root.parent / "proto") if folder.is_dir())
        included = build_data["force_include"]
        if self.target_name == "sdist":
            sources = [proto / "generate_stubs.py", *_files(proto / "third_party"), *_sources(proto)]
            included |= {str(path): f"proto/{path.relative_to(proto)}" for path in sources}
            included[str(proto.parent / "LICENSE")] = "LICENSE"
            return
        subprocess.run([sys.executable, proto / "generate_stubs.py"], check=True)
        included |= {str(proto / package): package for package in PACKAGES}


def _sources(proto: Path) -> Iterable[Path]:
    return (path for package in PACKAGES for path in _files(proto / package) if "_pb2" not in path.name)


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
