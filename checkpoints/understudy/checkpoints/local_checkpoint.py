"""A reader's own copy of a checkpoint, which outlives the writer's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from understudy.checkpoints.atomic import write_bytes
from understudy.checkpoints.checkpoint_errors import CheckpointError
from understudy.checkpoints.detached import INNER_NAME, LARGEST_BYTES, check_detached, hashes
from understudy.checkpoints.fs import read_within, remove_folder, temporary_folder
from understudy.checkpoints.kinds import ModelKind
from understudy.checkpoints.layout import MANIFEST_FILE
from understudy.checkpoints.manifest import Manifest, encode_manifest, read_manifest, verify_files, verify_sizes
from understudy.checkpoints.signing import AcceptedKeys


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
        """The digest that identifies the model."""
        return self.manifest.digest

    @property
    def created_at(self) -> float:
        """When it was written, in seconds since the Unix epoch."""
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
        """The path of the model: a file, a folder or the common prefix of several files, depending on its kind."""
        return self.directory / self.kind.file_name

    def verify(self) -> None:
        """Read all files and check them against the manifest.

        The files may be hard links, which the writer can still overwrite in place. Call this before each load.

        Raises:
            DamagedCheckpointError: A file differs from the manifest.
        """
        verify_files(self.directory, self.manifest)

    def release(self) -> None:
        """Delete the private folder. Idempotent."""
        remove_folder(self.directory)


def open_local_checkpoint(
    directory: Path, *, verify: bool = True, accepted: AcceptedKeys | None = None
) -> LocalCheckpoint:
    """Open a private folder that an earlier `Checkpoint.fetch` left, possibly in an earlier process.

    Args:
        directory: The private folder.
        verify: Whether to read its files. Otherwise only their sizes are checked.
        accepted: The keys of which one must have signed it; None if it need not be signed.

    Raises:
        FileNotFoundError: The folder does not exist.
        UntrustedCheckpointError: It is not signed as required.
        DamagedCheckpointError: It is incomplete or damaged.
        UnsupportedFormatError: Another version of this package wrote it.
    """
    manifest = read_private_manifest(directory, accepted)
    (verify_files if verify else verify_sizes)(directory, manifest)
    return LocalCheckpoint(directory=directory, manifest=manifest)


def read_private_manifest(
    directory: Path, accepted: AcceptedKeys | None = None, *, origin: Path | None = None
) -> Manifest:
    """Read the manifest of a private folder; see `read_manifest`.

    The manifest in the copy of a foreign checkpoint was written by this program; its detached signature is of the same
    files.
    """
    detached = directory / INNER_NAME
    if accepted is None or not detached.exists():
        return read_manifest(directory, accepted, origin=origin)
    manifest = read_manifest(directory, origin=origin)
    content = read_within(detached, directory, limit=LARGEST_BYTES)
    check_detached(content, hashes(manifest.files), accepted, origin=origin or directory, name=None)
    return manifest


def fetch_once(
    into: Path,
    *,
    step: int,
    digest: str,
    fill: Callable[[Path], Manifest],
    verify: bool = True,
    accepted: AcceptedKeys | None = None,
) -> LocalCheckpoint:
    """Create a private folder atomically, unless it already exists.

    It need not survive a power cut: the hashes reveal an incomplete folder, which is created again.

    Args:
        into: The private folder; its parent is created if missing.
        step: The step of the checkpoint.
        digest: The digest of the model. A folder with another or a damaged model is replaced.
        fill: Writes the files into the given folder and returns a manifest of them, which it may write there as well.
        verify: Whether to read the files of an existing folder. Otherwise only their sizes are checked.
        accepted: The keys of which one must have signed what exists; None if it need not be signed.

    Raises:
        Exception: Whatever ``fill`` raises; then no folder remains.
    """
    try:
        existing = open_local_checkpoint(into, verify=verify, accepted=accepted)
    except (FileNotFoundError, CheckpointError):
        pass
    else:
        if (existing.step, existing.digest) == (step, digest):
            return existing
    with temporary_folder(into) as folder:
        manifest = fill(folder)
        if not (folder / MANIFEST_FILE).exists():
            write_bytes(folder / MANIFEST_FILE, encode_manifest(manifest))
        remove_folder(into)
        folder.rename(into)
    return LocalCheckpoint(directory=into, manifest=manifest)
