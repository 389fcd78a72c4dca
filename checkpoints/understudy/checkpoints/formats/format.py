"""What a format is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from understudy.checkpoints.kinds import ModelKind


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a checkpoint says about itself.

    Attributes:
        digest: SHA-256 of what makes the model, dates left out, so that a model saved twice has one digest.
        iterations: How many steps its optimizer has taken; None if it has none or it has taken none.
    """

    digest: str
    iterations: int | None


class Format(Protocol):
    """How to find a writer's checkpoints in a folder, and how to tell that a copy of one is whole. Stateless."""

    @property
    def kind(self) -> ModelKind:
        """What such a checkpoint holds."""

    @property
    def description(self) -> str:
        """What to call such checkpoints, in the plural."""

    @property
    def settle_seconds(self) -> float:
        """How long a checkpoint must have been left alone before it is copied, because no checksum tells the rest."""

    def find(self, directory: Path) -> Iterable[Path]:
        """Return the writer's checkpoints: a file or folder each, or the common beginning of several files.

        Raises:
            OSError: The folder cannot be listed.
        """

    def files(self, path: Path) -> Mapping[str, Path]:
        """Return the files of one checkpoint by the names that a copy of them has.

        Raises:
            FileNotFoundError: It is not there any more.
        """

    def stem(self, path: Path) -> str:
        """Return the name that the writer gave a checkpoint, without what the format adds to it."""

    def inspect(self, copy: Path) -> Content:
        """Check that a copy is whole, as far as the format can tell, and read what identifies it.

        Args:
            copy: The copy's `ModelKind.file_name` in its folder. Nobody writes to it.

        Raises:
            DamagedCheckpointError: It is not whole.
            OSError: It could not be read.
        """
