"""Checkpoints of one file each, recognised by the file name's suffix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from understudy.checkpoints.formats.format import Content
from understudy.checkpoints.inspection import inspect_content
from understudy.checkpoints.kinds import ModelKind


@dataclass(frozen=True, kw_only=True)
class SingleFile:
    """See `Format`.

    Attributes:
        kind: The kind of model that the file holds.
        suffix: The suffix of its name.
        not_suffix: A longer suffix to exclude, where one suffix ends with another.
        settle_seconds: See `Format`.
    """

    kind: ModelKind
    suffix: str
    not_suffix: str | None = None
    settle_seconds: float = 0.0

    @property
    def description(self) -> str:
        """See `Format`."""
        return f"*{self.suffix} files"

    def find(self, directory: Path) -> Iterable[Path]:
        """See `Format`."""
        return [path for path in directory.iterdir() if self._matches(path.name) and path.is_file()]

    def files(self, path: Path) -> Mapping[str, Path]:
        """See `Format`."""
        return {self.kind.file_name: path}

    def stem(self, path: Path) -> str:
        """See `Format`."""
        return path.name.removesuffix(self.suffix)

    def inspect(self, copy: Path) -> Content:
        """See `Format`."""
        found = inspect_content(self.kind, copy)
        return Content(digest=str(found["digest"]), iterations=found["iterations"])

    def _matches(self, name: str) -> bool:
        excluded = self.not_suffix is not None and name.endswith(self.not_suffix)
        return name.endswith(self.suffix) and not excluded and not name.startswith(".")
