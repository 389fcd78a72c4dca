"""A reader's own copy of a checkpoint, which no writer can take away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from understudy.checkpoints.atomic import write_bytes
from understudy.checkpoints.checkpoint_errors import CheckpointError
from understudy.checkpoints.fs import remove_folder, temporary_folder
from understudy.checkpoints.kinds import ModelKind
from understudy.checkpoints.layout import MANIFEST_FILE
from understudy.checkpoints.manifest import Manifest, encode_manifest, read_manifest, verify_files, verify_sizes


@dataclass(frozen=True, kw_only=True)
class LocalCheckpoint:
    """A checkpoint in a private folder, with a manifest even if its writer wrote none."""

    directory: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Its training step."""
        return self.manifest.step

    @property
    def digest(self) -> str:
        """What identifies the model."""
        return self.manifest.digest

    @property
    def created_at(self) -> float:
        """When it was written, in seconds since the epoch of Unix."""
        return self.manifest.created_at

    @property
    def final(self) -> bool:
        """Whether training ended with it."""
        return self.manifest.final

    @property
    def kind(self) -> ModelKind:
        """How the model is stored."""
        return self.manifest.kind

    @property
    def model_file(self) -> Path:
        """The model: a file, a folder or the common beginning of several files, as its kind has it."""
        return self.directory / self.kind.file_name

    def verify(self) -> None:
        """Read all of it, and check that it is what its manifest says.

        Its files may be hard links, which their writer can still overwrite in place: so do this before each load.

        Raises:
            DamagedCheckpointError: It is not.
        """
        verify_files(self.directory, self.manifest)

    def release(self) -> None:
        """Delete the private folder; doing so again does nothing."""
        remove_folder(self.directory)


def open_local_checkpoint(directory: Path, *, verify: bool = True) -> LocalCheckpoint:
    """Open a private folder that an earlier `Checkpoint.take`, perhaps of an earlier process, left.

    Args:
        directory: The private folder.
        verify: Whether to read its files. Else only their sizes are checked.

    Raises:
        FileNotFoundError: There is none.
        DamagedCheckpointError: It is not whole any more.
        UnsupportedFormatError: Another version of this package made it.
    """
    manifest = read_manifest(directory)
    (verify_files if verify else verify_sizes)(directory, manifest)
    return LocalCheckpoint(directory=directory, manifest=manifest)


def fetch_once(into: Path, *, digest: str, fill: Callable[[Path], Manifest], verify: bool = True) -> LocalCheckpoint:
    """Make a private folder appear as a whole, unless it is there already.

    It need not survive a power cut: one that is not whole is found by its hashes and made again.

    Args:
        into: The private folder; its parent is made if it is missing.
        digest: Which model it is to hold. A folder that holds another, or a damaged one, is replaced.
        fill: Puts the files into the folder it is given and returns a manifest of them, which it may put there as well.
        verify: Whether to read the files of a folder that is there already. Else only their sizes are checked.

    Raises:
        Exception: What ``fill`` raises; then nothing is left.
    """
    try:
        existing = open_local_checkpoint(into, verify=verify)
    except (FileNotFoundError, CheckpointError):
        pass
    else:
        if existing.digest == digest:
            return existing
    with temporary_folder(into) as folder:
        manifest = fill(folder)
        if not (folder / MANIFEST_FILE).exists():
            write_bytes(folder / MANIFEST_FILE, encode_manifest(manifest))
        remove_folder(into)
        folder.rename(into)
    return LocalCheckpoint(directory=into, manifest=manifest)
