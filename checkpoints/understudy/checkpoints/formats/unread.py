"""Recognises what Keras writes and nothing here reads, to say so instead of waiting for checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

_SHARDED = ".weights.json"
_ORBAX_METADATA = "_CHECKPOINT_METADATA"


def unread_reason(directory: Path) -> str | None:
    """Return what a folder holds that is not read, and what to write instead; None if there is no such thing.

    Raises:
        OSError: The folder cannot be listed.
    """
    with os.scandir(directory) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    sharded = min((entry.name for entry in visible if entry.name.endswith(_SHARDED)), default=None)
    if sharded is not None:
        return (
            f"{directory} holds weights in several files ({sharded}), as Keras saves them with max_shard_size, which "
            "are not read; save them without max_shard_size to *.weights.h5 files, or whole models to *.keras files"
        )
    orbax = min((entry.name for entry in visible if entry.is_dir() and _is_orbax(Path(entry.path))), default=None)
    if orbax is not None:
        return (
            f"{directory} holds checkpoints of Orbax ({orbax}), as keras.callbacks.OrbaxCheckpoint writes them, which "
            "are not read; have keras.callbacks.ModelCheckpoint write whole models to *.keras files"
        )
    return None


def _is_orbax(folder: Path) -> bool:
    return (folder / _ORBAX_METADATA).is_file()
