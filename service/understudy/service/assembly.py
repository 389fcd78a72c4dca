"""Builds the evaluator that the settings describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from understudy.checkpoints.folder import FolderSource
from understudy.checkpoints.layout import RunDir
from understudy.checkpoints.source import CheckpointSource, RunSource
from understudy.evaluator.compute.devices import build_strategy
from understudy.evaluator.datasets import EvaluationDataset, load_npz
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.experiment_datasets import datasets_of
from understudy.evaluator.observer import Observer
from understudy.evaluator.parts import device_settings
from understudy.evaluator.settings import EvaluatorSettings
from understudy.experiments import Experiment, load_experiment
from understudy.service.settings import ServeSettings

DEFAULT_MODEL_NAME = "model"


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """An evaluator that has not been started, and the name its model is served under."""

    evaluator: Evaluator
    model_name: str


def assemble(settings: ServeSettings, evaluator_settings: EvaluatorSettings, observer: Observer) -> Assembled:
    """Lay out the devices, load the experiment and the datasets, and build the evaluator. Blocks.

    The devices come first, because a user's own code may set TensorFlow going, after which they cannot be changed.

    Raises:
        DeviceError: The devices cannot be had.
        ExperimentError: The experiment cannot be loaded.
        ConfigurationError: A dataset cannot be used.
        CheckpointError: The state folder holds something else.
    """
    build_strategy(device_settings(evaluator_settings))
    experiment = None if settings.experiment is None else load_experiment(settings.experiment)
    state_dir = settings.evaluator_state_dir
    evaluator = Evaluator(
        replace(evaluator_settings, state_dir=state_dir),
        source=_source(settings, state_dir),
        datasets=_datasets(settings, experiment),
        observer=observer,
    )
    named = DEFAULT_MODEL_NAME if experiment is None else experiment.name
    return Assembled(evaluator=evaluator, model_name=settings.model_name or named)


def _source(settings: ServeSettings, state_dir: Path) -> CheckpointSource:
    if settings.run_dir is not None:
        return RunSource(RunDir(settings.run_dir))
    return FolderSource(settings.source_dir, state_dir / "staging")


def _datasets(settings: ServeSettings, experiment: Experiment | None) -> Sequence[EvaluationDataset]:
    files = [load_npz(name, file) for name, file in settings.eval_data.items()]
    return files if experiment is None else [*datasets_of(experiment), *files]
