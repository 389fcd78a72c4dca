"""Builds `understudy`. In a clone it contains the packages of `understudy-client`; an sdist requires that instead.

See docs/decisions/distributions.md.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class DependenciesHook(MetadataHookInterface):
    """Sets the dependencies of a build from a clone: the command's, and the client's own.

    Hatchling does not call it in an unpacked sdist, whose PKG-INFO holds the dependencies.
    """

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the dependencies to the metadata."""
        client = tomllib.loads((Path(self.root) / "clients" / "pyproject.toml").read_text(encoding="utf-8"))
        metadata["dependencies"] = [*client["project"]["dependencies"], *self.config["dependencies"]]


class BuildHook(BuildHookInterface[Any]):
    """Generates the gRPC stubs for a wheel or an editable install; has an sdist require the client."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Prepare one build; raise CalledProcessError if protoc refuses a file."""
        if self.target_name == "sdist":
            build_data["dependencies"].append(f"understudy-client=={self.metadata.version}")
            return
        subprocess.run([sys.executable, Path(self.root) / "proto" / "generate_stubs.py"], check=True)
