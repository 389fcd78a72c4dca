"""The interface of a checkpoint format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from understudy.checkpoints.kinds import ModelKind


@dataclass(frozen=True, kw_only=True)
class Content:
    """The identity of a checkpoint's content.

    Attributes:
        digest: SHA-256 of the model without dates, so that saving a model twice gives the same digest.
        iterations: The number of steps that its optimizer has taken; None if it has no optimizer or no steps.
        may_grow: Whether it is complete as it is, but its writer may be about to add a file.
    """

    digest: str
    iterations: int | None
    may_grow: bool = False


class Format(Protocol):
    """Finds a writer's checkpoints in a folder and checks that a copy of one is complete. Stateless."""

    @property
    def kind(self) -> ModelKind:
        """The kind of model that such a checkpoint holds."""

    @property
    def description(self) -> str:
        """The name of such checkpoints in messages, in the plural."""

    @property
    def settle_seconds(self) -> float:
        """How long a checkpoint must be unchanged before it is copied; covers formats without checksums."""

    def find(self, directory: Path) -> Iterable[Path]:
        """Return the writer's checkpoints: a file or folder each, or the common prefix of several files.

        Raises:
            OSError: The folder cannot be listed.
        """

    def files(self, path: Path) -> Mapping[str, Path]:
        """Return the files of one checkpoint by their names in a copy.

        Raises:
            FileNotFoundError: It no longer exists.
        """

    def stem(self, path: Path) -> str:
        """Return the writer's name for a checkpoint, without the format's suffixes."""

    def inspect(self, copy: Path) -> Content:
        """Check that a copy is complete, as far as the format allows, and read its identity.

        Args:
            copy: The copy's `ModelKind.file_name` in its folder. It must not change meanwhile.

        Raises:
            DamagedCheckpointError: It is incomplete or damaged.
            OSError: It could not be read.
        """
