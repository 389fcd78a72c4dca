"""Checkpoints that ``tf.train.Checkpoint`` writes, alone or through a ``tf.train.CheckpointManager``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath

from understudy.checkpoints.checkpoint_errors import DamagedCheckpointError
from understudy.checkpoints.formats.format import Content
from understudy.checkpoints.formats.tensor_bundle import INDEX_SUFFIX, bundle_files, read_bundle
from understudy.checkpoints.fs import read_within
from understudy.checkpoints.inspection import inspect_structure
from understudy.checkpoints.kinds import ModelKind

STATE_FILE = "checkpoint"
_LARGEST_STATE_BYTES = 2**24
_LISTED = re.compile(r'^all_model_checkpoint_paths: "(.*)"$', re.MULTILINE)


class TensorFlowCheckpoint:
    """See `Format`. A manager's state file, which it writes last, lists the checkpoints."""

    kind = ModelKind.TF_CHECKPOINT
    description = "checkpoints of tf.train"
    settle_seconds = 0.0

    def find(self, directory: Path) -> Iterable[Path]:
        """See `Format`."""
        try:
            content = read_within(directory / STATE_FILE, directory, limit=_LARGEST_STATE_BYTES)
        except (FileNotFoundError, DamagedCheckpointError):
            names = [path.name.removesuffix(INDEX_SUFFIX) for path in directory.iterdir() if _is_index(path)]
        else:
            names = [PurePath(path).name for path in _LISTED.findall(content.decode(errors="replace"))]
        return [directory / name for name in names if (directory / f"{name}{INDEX_SUFFIX}").is_file()]

    def files(self, path: Path) -> Mapping[str, Path]:
        """See `Format`."""
        return {self.kind.file_name + file.name.removeprefix(path.name): file for file in bundle_files(path)}

    def stem(self, path: Path) -> str:
        """See `Format`."""
        return path.name

    def inspect(self, copy: Path) -> Content:
        """See `Format`."""
        inspect_structure(self.kind, copy)
        try:
            return read_bundle(copy)
        except ValueError as error:
            raise DamagedCheckpointError(f"{copy.name} is not a whole TensorFlow checkpoint: {error}") from error


def _is_index(path: Path) -> bool:
    return path.name.endswith(INDEX_SUFFIX) and not path.name.startswith(".")
