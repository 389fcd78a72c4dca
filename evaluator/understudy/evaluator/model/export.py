"""Exports a checkpoint of a run as a Keras file or as a SavedModel. Needs no running evaluator.

TensorFlow is imported only if the model must be built.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from understudy.checkpoints.checkpoint_errors import CheckpointError, RemoteStorageError
from understudy.checkpoints.fs import temporary_folder
from understudy.checkpoints.keras_signature import interface_of
from understudy.checkpoints.kinds import ModelKind
from understudy.checkpoints.layout import BEST_FILE, LEASES_DIR, MODEL_FILE, RunDir, parse_step, step_name
from understudy.checkpoints.local_checkpoint import LocalCheckpoint
from understudy.checkpoints.remote.files import RemoteFiles, open_remote
from understudy.checkpoints.remote.run_source import RemoteRunSource
from understudy.checkpoints.signing import AcceptedKeys
from understudy.checkpoints.source import Checkpoint, PublishedCheckpoint
from understudy.checkpoints.temporary_folders import TemporaryFolder
from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import ConfigurationError, LoadError, VersionNotFoundError, available_steps
from understudy.evaluator.model.keras_version import is_archive_of_keras_2

if TYPE_CHECKING:
    from understudy.evaluator.model.loaders import BuiltModel

LoadModel = Callable[[LocalCheckpoint], "BuiltModel"]
ExportFormat = Literal["keras", "saved_model"]
KERAS_SUFFIX = ".keras"


class CheckpointExporter:
    """The checkpoints of a run on disk: those that the trainer keeps, and those that the evaluator leases.

    Args:
        run_dir: The run folder, or None if another program writes the checkpoints.
        state_dir: The evaluator's state folder.
        run_url: The remote run folder, instead of ``run_dir``; None if there is none.
        build_model: Returns a new Keras model, for checkpoints that hold only variables; None if there is no such
            function.
        allow_unsafe_models: Whether a stored model may name any class, function and operation.
        accepted: The keys of which one must have signed a checkpoint; None if it need not be signed.
    """

    def __init__(
        self,
        *,
        run_dir: Path | None,
        state_dir: Path,
        run_url: str | None = None,
        build_model: Callable[[], Any] | None = None,
        allow_unsafe_models: bool = False,
        accepted: AcceptedKeys | None = None,
    ) -> None:
        self._run = None if run_dir is None else RunDir(run_dir)
        self._remote = None if run_url is None else open_remote(run_url)
        self._state_dir = state_dir
        self._build_model = build_model
        self._allow_unsafe_models = allow_unsafe_models
        self._accepted = accepted

    def steps(self) -> list[int]:
        """Return the steps that can be exported, ascending.

        Raises:
            LoadError: The remote run folder cannot be read.
        """
        leased = (parse_step(folder.name) for folder in (self._state_dir / LEASES_DIR).glob("*"))
        kept = [] if self._run is None else self._run.committed_steps()
        if self._remote is not None:
            with TemporaryFolder() as mirror:
                kept = [checkpoint.step for checkpoint in self._published(self._remote, mirror.path)]
        return sorted({*(step for step in leased if step is not None), *kept})

    def resolve(self, step: int | Literal["best", "latest"]) -> int:
        """Return the step that ``best`` or ``latest`` stands for, or the step itself.

        Raises:
            VersionNotFoundError: There is no checkpoint yet.
            ConfigurationError: The evaluator's ``best.json`` is damaged.
        """
        if isinstance(step, int):
            return step
        self._check_copies()
        if step == "latest":
            steps = self.steps()
            if not steps:
                where = "kept" if self._remote is None else f"at {self._remote.url}"
                raise VersionNotFoundError(f"there is no checkpoint yet, neither {where} nor held in {self._state_dir}")
            return self._latest(steps[-1])
        return self._best()

    def _latest(self, highest: int) -> int:
        """Return the highest step, unless only the evaluator has it, and the run one that was written later."""
        leased = self._state_dir / LEASES_DIR / step_name(highest)
        with TemporaryFolder() as mirror, contextlib.suppress(OSError, CheckpointError):  # told when it is exported
            kept = self._newest_kept(mirror.path)
            if kept is not None and kept.step != highest:
                held = PublishedCheckpoint.read(leased, self._accepted, is_private=True)
                return kept.step if kept.created_at > held.created_at else highest
        return highest

    def _newest_kept(self, mirror: Path) -> Checkpoint | None:
        if self._remote is not None:
            return next(reversed(self._published(self._remote, mirror)), None)
        steps = [] if self._run is None else self._run.committed_steps()
        if self._run is None or not steps:
            return None
        return PublishedCheckpoint.read(self._run.checkpoint(steps[-1]), self._accepted)

    def export(self, step: int, output: Path, form: ExportFormat) -> Path:
        """Write one checkpoint atomically; return its path.

        Args:
            step: The step.
            output: For ``keras``, a path that ends in ``.keras``, or the folder to put ``model.keras`` into; for
                ``saved_model``, the folder that becomes the SavedModel.
            form: ``keras`` copies a ``.keras`` file of Keras 3 unchanged, and converts other formats that hold a Keras
                model, without the optimizer's state; ``saved_model`` writes a model for serving systems: one signature,
                ``serving_default``, with the model's names for inputs and outputs and any batch size.

        Raises:
            VersionNotFoundError: There is no checkpoint of this step.
            ConfigurationError: The output already exists.
            LoadError: The checkpoint is damaged, or cannot be written in this form.
            OSError: The output cannot be written.
        """
        target = output / MODEL_FILE if form == "keras" and output.suffix != KERAS_SUFFIX else output
        if target.exists():
            raise ConfigurationError(f"{target} is there already; choose another output or move it away")
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(target) as folder, self.local_checkpoint(step, folder) as local:
            self._write(local, folder / f"written{target.suffix}", form).rename(target)
        return target

    def _write(self, local: LocalCheckpoint, path: Path, form: ExportFormat) -> Path:
        if form == "keras" and local.kind is ModelKind.KERAS and not is_archive_of_keras_2(local.model_file):
            shutil.copyfile(local.model_file, path)
            return path
        write = _write_keras if form == "keras" else _write_saved_model
        write(local, path, self._load)
        return path

    def _load(self, checkpoint: LocalCheckpoint) -> BuiltModel:
        from understudy.checkpoints.initial_values import weights_are_loaded
        from understudy.compat import repair_open_axes
        from understudy.evaluator.model.loaders import loader_for

        repair_open_axes()
        loader = loader_for(checkpoint.kind, self._build_model, allow_unsafe_models=self._allow_unsafe_models)
        with weights_are_loaded():
            return loader.build(checkpoint.model_file)

    @property
    def _is_foreign(self) -> bool:
        """Whether another program writes the checkpoints, so that only the copies of a server are read."""
        return self._run is None and self._remote is None

    def _check_copies(self) -> None:
        """Raise VersionNotFoundError if there are only copies of a server, and it has made none."""
        if self._is_foreign and not self.steps():
            raise VersionNotFoundError(
                f"the state folder {self._state_dir} holds no checkpoint: this command reads the copies that "
                "`understudy serve --checkpoints` makes there. Start a server first, or give the state folder of one "
                "(--state-dir)"
            )

    def _best(self) -> int:
        file = self._state_dir / BEST_FILE
        try:
            return int(json.loads(file.read_bytes())["step"])
        except FileNotFoundError as error:
            scorer = (
                "start a server that scores them"
                if self._remote is None
                else "the state folder of the server that scores them (--state-dir)"
            )
            raise VersionNotFoundError(
                f"no checkpoint is best yet: there is no {file}, which a server writes when it has scored the first "
                f"one. Give latest or a step, or {scorer}"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{file} is damaged ({error}); delete it, and the evaluator writes it when it is started"
            ) from error

    @contextmanager
    def local_checkpoint(self, step: int, folder: Path) -> Iterator[LocalCheckpoint]:
        """Yield a verified private copy of a checkpoint in a folder.

        Raises:
            VersionNotFoundError: There is no checkpoint of this step.
            LoadError: It is damaged, or not signed as required.
        """
        for origin, is_private in self._origins(step):
            try:
                checkpoint = PublishedCheckpoint.read(origin, self._accepted, is_private=is_private)
                if checkpoint.step != step:
                    raise LoadError(f"step {step} cannot be exported: {origin} holds step {checkpoint.step}")
                local = checkpoint.fetch(folder / "taken")
            except FileNotFoundError:
                continue
            except CheckpointError as error:
                raise LoadError(f"step {step} cannot be exported: {error}") from error
            yield local
            return
        if self._remote is not None:
            for remote in self._published(self._remote, folder / "mirror", step):
                if remote.step == step:
                    yield self._fetch(remote, folder / "taken")
                    return
        self._check_copies()
        where = f" in {self._state_dir}, the state folder (--state-dir) of the server" if self._is_foreign else ""
        raise VersionNotFoundError(
            f"there is no checkpoint of step {step}{where}; {available_steps(self.steps(), step)}"
        )

    def _published(self, files: RemoteFiles, mirror: Path, *wanted: int) -> Sequence[Checkpoint]:
        """Return the checkpoints of the remote run folder."""
        source = RemoteRunSource(files, RunDir(mirror), accepted=self._accepted)
        try:
            source.poll(wanted)
            while not source.is_complete:
                source.poll(wanted)
        except OSError as error:
            raise LoadError(f"{files.url} cannot be read: {error}") from error
        return source.found

    def _fetch(self, checkpoint: Checkpoint, into: Path) -> LocalCheckpoint:
        try:
            return checkpoint.fetch(into)
        except (RemoteStorageError, CheckpointError) as error:
            raise LoadError(f"step {checkpoint.step} cannot be exported: {error}") from error

    def _origins(self, step: int) -> list[tuple[Path, bool]]:
        """Return the folders that may hold a step, and whether each is private to the evaluator."""
        leased = (self._state_dir / LEASES_DIR / step_name(step), True)
        return [leased] if self._run is None else [leased, (self._run.checkpoint(step), False)]


def _write_keras(checkpoint: LocalCheckpoint, file: Path, load: LoadModel) -> None:
    """Write a ``.keras`` file, compiled like the checkpoint's model, without the optimizer's state.

    Raises:
        LoadError: The model cannot be built, or Keras cannot store it.
    """
    if checkpoint.kind is ModelKind.SAVED_MODEL:
        raise LoadError(
            f"step {checkpoint.step} is stored as a SavedModel, of which no .keras file is made; export it as "
            "saved_model"
        )
    built = load(checkpoint)
    try:
        if built.compile_config:
            built.model.compile_from_config(built.compile_config)
        built.model.save(file)
    except Exception as error:
        raise LoadError(f"step {checkpoint.step} cannot be written as a .keras file: {first_line(error)}") from error


def _write_saved_model(checkpoint: LocalCheckpoint, folder: Path, load: LoadModel) -> None:
    """Write a SavedModel with one signature, ``serving_default``; a SavedModel is copied unchanged.

    Raises:
        LoadError: The model cannot be built, or TensorFlow cannot store it.
    """
    if checkpoint.kind is ModelKind.SAVED_MODEL:
        shutil.copytree(checkpoint.model_file, folder)
        return
    import tensorflow as tf

    module, signature = _servable(load(checkpoint).model)
    try:
        tf.saved_model.save(module, str(folder), signatures={"serving_default": signature})
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise LoadError(f"step {checkpoint.step} cannot be written as a SavedModel: {first_line(error)}") from error


def _servable(model: Any) -> tuple[Any, Any]:
    """Return a module with the model and its serving function, and the function's signature for any batch size."""
    import tensorflow as tf

    from understudy.evaluator.model.forward import tensor_spec

    interface = interface_of(model)
    names = {_argument(spec.name): spec for spec in interface.inputs.specs}

    def serve(**inputs: Any) -> dict[str, Any]:
        leaves = {spec.name: inputs[argument] for argument, spec in names.items()}
        return interface.outputs.flatten(model(interface.inputs.unflatten(leaves), training=False))

    module = tf.Module()
    module.model = model
    module.serve = tf.function(serve, autograph=False)
    specs = {name: tensor_spec(spec) for name, spec in names.items()}
    return module, module.serve.get_concrete_function(**specs)


def _argument(name: str) -> str:
    """Return an input's name as a valid TensorFlow argument name."""
    return "".join(letter if letter.isalnum() or letter == "_" else "_" for letter in name)
