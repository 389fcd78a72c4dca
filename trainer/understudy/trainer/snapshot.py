"""The exact state of a training, stored for resuming in ``resume/state.npz`` and ``resume/state.json``.

The archive holds ``trained/<i>`` and ``optimizer/<i>`` (the same on all replicas), and ``replica/<i>``, each replica's
own values ``[replicas, ...]``, or ``[1, ...]`` if they are all equal. Variables are identified by position, because the
names that Keras makes up depend on what else the process built.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from understudy.checkpoints.layout import RESUME_DIR
from understudy.trainer.trainer_errors import NonFiniteLossError, ResumeError

Array = npt.NDArray[Any]

FORMAT_VERSION = 1
_ARRAYS_FILE = "state.npz"
_FACTS_FILE = "state.json"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The values of all variables after a step.

    Attributes:
        step: Steps done.
        facts: Settings that must not change for an exact resume, by name.
        trained: The trained variables.
        optimizer: The optimizer's variables.
        replica: Every replica's own variables, ``[replicas, ...]``.
    """

    step: int
    facts: Mapping[str, int]
    trained: Sequence[Array]
    optimizer: Sequence[Array]
    replica: Sequence[Array]

    @classmethod
    def of(cls, model: Any, *, step: int, facts: Mapping[str, int], replica: Sequence[Array]) -> Self:
        """Return the values of a model and its optimizer, with every replica's own variables."""
        return cls(
            step=step,
            facts=facts,
            trained=[variable.numpy() for variable in model.trainable_variables],
            optimizer=[variable.numpy() for variable in model.optimizer.variables],
            replica=replica,
        )

    def check_finite(self) -> None:
        """Raise NonFiniteLossError if a weight is NaN or infinite."""
        for values in (*self.trained, *self.replica):
            if not np.isfinite(values).all():
                raise NonFiniteLossError(
                    f"after step {self.step} a weight is NaN or infinite, so that step is not published; "
                    "lower the learning rate or clip the gradients",
                )


def write_snapshot(checkpoint: Path, snapshot: Snapshot) -> None:
    """Write a snapshot into a checkpoint's folder."""
    folder = checkpoint / RESUME_DIR
    folder.mkdir()
    arrays = {
        **_numbered("trained", snapshot.trained),
        **_numbered("optimizer", snapshot.optimizer),
        **_numbered("replica", [_one_if_alike(rows) for rows in snapshot.replica]),
    }
    np.savez(folder / _ARRAYS_FILE, allow_pickle=False, **arrays)
    facts = {"format_version": FORMAT_VERSION, "step": snapshot.step, **snapshot.facts}
    (folder / _FACTS_FILE).write_text(json.dumps(facts, indent=2) + "\n")


def read_snapshot(checkpoint: Path, *, like: Snapshot) -> Snapshot:
    """Read the snapshot in a checkpoint's folder.

    Args:
        checkpoint: The folder.
        like: A snapshot, at any step, of the training that will resume.

    Raises:
        ResumeError: There is none, or it belongs to another training. The text names the first difference.
    """
    folder = checkpoint / RESUME_DIR
    try:
        facts = json.loads((folder / _FACTS_FILE).read_text())
        step = int(facts["step"])
        _check_facts(checkpoint, facts, {"format_version": FORMAT_VERSION, **like.facts})
        with np.load(folder / _ARRAYS_FILE, allow_pickle=False) as arrays:
            return Snapshot(
                step=step,
                facts=like.facts,
                trained=_read("trained", arrays, like.trained, checkpoint),
                optimizer=_read("optimizer", arrays, like.optimizer, checkpoint),
                replica=_read("replica", arrays, like.replica, checkpoint),
            )
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ResumeError(
            f"{checkpoint} cannot be resumed from: {type(error).__name__}: {error}; delete that folder to resume from "
            "the checkpoint before it, or choose another run folder",
        ) from error


def _check_facts(checkpoint: Path, found: Mapping[str, Any], expected: Mapping[str, int]) -> None:
    for name, value in expected.items():
        if found.get(name) != value:
            raise ResumeError(
                f"{checkpoint} was trained with {name} {found.get(name)}, this training has {value}, so it cannot "
                f"resume exactly; set {name} back, or choose another run folder",
            )


def _numbered(group: str, arrays: Sequence[Array]) -> dict[str, Array]:
    return {f"{group}/{index}": array for index, array in enumerate(arrays)}


def _one_if_alike(rows: Array) -> Array:
    first = rows[:1]
    return first if all(row.tobytes() == first.tobytes() for row in rows) else rows


def _read(group: str, arrays: Mapping[str, Array], like: Sequence[Array], checkpoint: Path) -> list[Array]:
    stored = sum(name.startswith(f"{group}/") for name in arrays)
    if stored != len(like):
        raise ResumeError(_other_model(checkpoint, f"{stored} {group} variables", f"{len(like)}"))
    return [
        _fit(_spread(group, arrays[f"{group}/{index}"], expected), expected, checkpoint, f"{group} variable {index}")
        for index, expected in enumerate(like)
    ]


def _spread(group: str, array: Array, expected: Array) -> Array:
    """Undo `_one_if_alike`."""
    if group != "replica" or array.shape[0] != 1:
        return array
    return np.repeat(array, expected.shape[0], axis=0)


def _fit(array: Array, expected: Array, checkpoint: Path, name: str) -> Array:
    # NumPy stores bfloat16 and similar types as plain bytes.
    typed = array.view(expected.dtype) if array.dtype.kind == "V" else array
    if typed.shape != expected.shape or typed.dtype != expected.dtype:
        raise ResumeError(
            _other_model(checkpoint, f"{name} as {typed.dtype}{typed.shape}", f"{expected.dtype}{expected.shape}"),
        )
    return typed


def _other_model(checkpoint: Path, found: str, expected: str) -> str:
    return (
        f"{checkpoint} holds another model: it has {found}, this training's model has {expected}; "
        "choose another run folder for another model"
    )
