"""Takes a checkpoint out of a run, as a Keras file or as a SavedModel. Needs no running evaluator.

TensorFlow is imported only to write a SavedModel.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from understudy.checkpoints.errors import CheckpointError
from understudy.checkpoints.folders import temporary_folder
from understudy.checkpoints.kinds import ModelKind
from understudy.checkpoints.layout import BEST_FILE, MODEL_FILE, PINNED_DIR, RunDir, parse_step, step_name
from understudy.checkpoints.manifest import read_manifest
from understudy.checkpoints.source import PublishedCheckpoint
from understudy.checkpoints.taken import TakenCheckpoint
from understudy.evaluator.errors import ConfigurationError, EvaluatorError, LoadError, VersionNotFoundError

ExportFormat = Literal["keras", "saved_model"]
KERAS_SUFFIX = ".keras"


class CheckpointStore:
    """The checkpoints of a run on disk: those the trainer has kept, and those the evaluator holds.

    Args:
        run_dir: The run folder, or None if somebody else writes the checkpoints.
        state_dir: The evaluator's state folder.
    """

    def __init__(self, *, run_dir: Path | None, state_dir: Path) -> None:
        self._run = None if run_dir is None else RunDir(run_dir)
        self._state_dir = state_dir

    def steps(self) -> list[int]:
        """Return the steps that can be exported, ascending."""
        held = (parse_step(folder.name) for folder in (self._state_dir / PINNED_DIR).glob("*"))
        kept = [] if self._run is None else self._run.committed_steps()
        return sorted({*(step for step in held if step is not None), *kept})

    def resolve(self, step: int | Literal["best", "latest"]) -> int:
        """Return the step that is meant.

        Raises:
            VersionNotFoundError: There is none yet.
            ConfigurationError: The evaluator's ``best.json`` is damaged.
        """
        if step == "best":
            return self._best()
        if step == "latest":
            steps = self.steps()
            if not steps:
                raise VersionNotFoundError(f"there is no checkpoint yet, neither kept nor held in {self._state_dir}")
            return steps[-1]
        return step

    def export(self, step: int, output: Path, form: ExportFormat) -> Path:
        """Write one checkpoint; return where it is. It appears there as a whole or not at all.

        Args:
            step: The step.
            output: For ``keras``, a path that ends in ``.keras``, or the folder to put ``model.keras`` into; for
                ``saved_model``, the folder that becomes the SavedModel.
            form: ``keras`` copies the file as it is, ``saved_model`` writes what serving systems load: one signature,
                ``serving_default``, with the model's names for inputs and outputs and any number of rows.

        Raises:
            VersionNotFoundError: There is no checkpoint of this step.
            ConfigurationError: There is something at the output already.
            LoadError: The checkpoint is not whole, or not stored as a Keras file.
            OSError: The output cannot be written.
        """
        target = output / MODEL_FILE if form == "keras" and output.suffix != KERAS_SUFFIX else output
        if target.exists():
            raise ConfigurationError(f"{target} is there already; choose another output or move it away")
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(target) as folder, self._taken(step, folder) as taken:
            written = folder / "written"
            if form == "keras":
                shutil.copyfile(taken.model_file, written)
            else:
                _write_saved_model(taken.model_file, written)
            written.rename(target)
        return target

    def _best(self) -> int:
        file = self._state_dir / BEST_FILE
        try:
            return int(json.loads(file.read_bytes())["step"])
        except FileNotFoundError as error:
            raise VersionNotFoundError(
                f"no checkpoint is best yet: there is no {file}; it is written when the first one was scored"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{file} is damaged ({error}); delete it, and the evaluator writes it when it is started"
            ) from error

    @contextmanager
    def _taken(self, step: int, folder: Path) -> Iterator[TakenCheckpoint]:
        """Give a verified copy of a checkpoint, which nobody deletes meanwhile."""
        for origin in self._origins(step):
            try:
                checkpoint = PublishedCheckpoint(directory=origin, manifest=read_manifest(origin))
                taken = checkpoint.take(folder / "taken")
            except FileNotFoundError:
                continue
            except CheckpointError as error:
                raise LoadError(f"step {step} cannot be exported: {error}") from error
            if taken.kind is not ModelKind.KERAS:
                raise LoadError(f"step {step} is stored as {taken.kind.value}; only .keras files can be exported")
            yield taken
            return
        raise VersionNotFoundError(f"there is no checkpoint of step {step}; there are {self.steps()}")

    def _origins(self, step: int) -> list[Path]:
        held = self._state_dir / PINNED_DIR / step_name(step)
        return [held] if self._run is None else [held, self._run.checkpoint(step)]


def _write_saved_model(model_file: Path, folder: Path) -> None:
    import tensorflow as tf

    from understudy.checkpoints.keras_signature import interface_of
    from understudy.evaluator.compute.forward import tensor_spec
    from understudy.evaluator.compute.model_file import build_model

    model = build_model(model_file)
    interface = interface_of(model)
    names = {_argument(spec.name): spec for spec in interface.inputs.specs}

    def serve(**inputs: Any) -> dict[str, Any]:
        leaves = {spec.name: inputs[argument] for argument, spec in names.items()}
        return interface.outputs.flatten(model(interface.inputs.unflatten(leaves), training=False))

    module = tf.Module()
    module.model = model
    module.serve = tf.function(serve, autograph=False)
    signature = module.serve.get_concrete_function(**{name: tensor_spec(spec) for name, spec in names.items()})
    try:
        tf.saved_model.save(module, str(folder), signatures={"serving_default": signature})
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise EvaluatorError(f"{model_file.name} cannot be written as a SavedModel: {error}") from error


def _argument(name: str) -> str:
    """Return an input's name as TensorFlow lets arguments be called."""
    return "".join(letter if letter.isalnum() or letter == "_" else "_" for letter in name)
