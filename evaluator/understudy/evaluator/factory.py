"""Builds an evaluator from command-line values: folders, the name of an experiment, data files."""

from __future__ import annotations

import errno
import logging
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from understudy.checkpoints.checkpoint_errors import RemoteStorageError, StorageRefusalError
from understudy.checkpoints.folder_source import FolderSource
from understudy.checkpoints.layout import RunDir
from understudy.checkpoints.remote.files import open_remote
from understudy.checkpoints.remote.folder_source import RemoteFolderSource
from understudy.checkpoints.remote.run_source import RemoteRunSource
from understudy.checkpoints.run_source import RunSource
from understudy.checkpoints.signing import AcceptedKeys, accepted_keys
from understudy.checkpoints.source import CheckpointSource
from understudy.evaluator.assembly.component_options import breakdown_options, device_settings
from understudy.evaluator.datasets.dataset import EvaluationDataset, datasets_of
from understudy.evaluator.datasets.dataset_files import open_dataset
from understudy.evaluator.evaluation.slices import columns_of
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.evaluator_errors import ConfigurationError, StorageError
from understudy.evaluator.model.devices import build_strategy
from understudy.evaluator.observer import Observer
from understudy.evaluator.records.outbox import Subscription
from understudy.evaluator.serving.following import EvaluatorLink, NetworkFollowing
from understudy.evaluator.settings import CheckpointLocation, EvaluatorSettings
from understudy.evaluator.sharding.cluster_pool import check_cluster
from understudy.evaluator.sharding.cluster_scoring import Cluster
from understudy.evaluator.tuning.tuning_file import TuningStart
from understudy.experiments import Experiment, load_experiment
from understudy.experiments.experiment_data import slices_of

DEFAULT_MODEL_NAME = "model"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NamedEvaluator:
    """An evaluator that has not been started, and the default name of its model."""

    evaluator: Evaluator
    model_name: str


def create_evaluator(
    location: CheckpointLocation,
    settings: EvaluatorSettings,
    observer: Observer,
    subscriptions: Sequence[Subscription] = (),
    *,
    link: EvaluatorLink | None = None,
) -> NamedEvaluator:
    """Configure the devices, load the experiment and the datasets, and build the evaluator. Blocks.

    The devices come first, because user code may initialize TensorFlow, after which they cannot be changed.

    Args:
        location: The checkpoints and datasets.
        settings: The operator's settings.
        observer: Receives the evaluator's events.
        subscriptions: What reads the outbox.
        link: The connection to the evaluator that is followed at addresses; None if there is none.

    Raises:
        DeviceError: The devices are not available.
        ExperimentError: The experiment cannot be loaded.
        ConfigurationError: A dataset or the folder of checkpoints cannot be used.
        StorageError: The disk of the state folder is full.
        CheckpointError: The state folder holds other files, or the checkpoints cannot be read.
    """
    _check_follow(location, settings)
    _check_state_dir(settings.state_dir)
    breakdown_options(settings)
    cluster = _cluster(location, settings)
    tuning = TuningStart.read(settings, location.experiment)
    build_strategy(device_settings(settings, tuning))
    experiment = None if location.experiment is None else load_experiment(location.experiment)
    if experiment is not None:
        settings = replace(settings, slice=(*settings.slice, *slices_of(experiment)))
    accepted = accepted_keys(settings.require_signature, run=settings.run_name, folder=location.folder)
    following = None if link is None else _following(link, location, settings, accepted)
    evaluator = Evaluator(
        settings,
        source=following or _source(location, settings, accepted),
        following=following,
        cluster=cluster,
        accepted=accepted,
        datasets=_datasets(location, experiment, columns_of(breakdown_options(settings).slices)),
        build_model=None if experiment is None else experiment.build_model,
        tuning=tuning,
        observer=observer,
        subscriptions=subscriptions,
    )
    return NamedEvaluator(evaluator=evaluator, model_name=DEFAULT_MODEL_NAME if experiment is None else experiment.name)


def _check_follow(location: CheckpointLocation, settings: EvaluatorSettings) -> None:
    if settings.follow is None:
        return
    if not location.is_run:
        raise ConfigurationError("follow goes with run_dir, whose checkpoints the other evaluator serves as well")
    if location.eval_data or location.experiment is not None:
        raise ConfigurationError("follow goes without eval_data and experiment: the other evaluator scores")
    if settings.follow_folder is not None and settings.follow_folder.resolve() == settings.state_dir.resolve():
        raise ConfigurationError(
            f"follow is {settings.follow}, the state folder of this server; give it one of its own with --state-dir"
        )


def _following(
    link: EvaluatorLink, location: CheckpointLocation, settings: EvaluatorSettings, accepted: AcceptedKeys | None
) -> NetworkFollowing:
    is_shared = location.folder != settings.state_dir
    if is_shared and location.url is not None:
        raise ConfigurationError(
            f"follow HOST:PORT goes without {location.url}: the evaluator sends the checkpoints; leave out run_dir"
        )
    if is_shared:
        _say_if_missing(RunDir(location.folder).checkpoints)
    return NetworkFollowing(
        link,
        state_dir=settings.state_dir,
        run=RunDir(location.folder) if is_shared else None,
        accepted=accepted,
        max_download_mib=settings.follow_download_mib,
    )


def _check_state_dir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"state_dir {folder}: {error.strerror}; make room there") from error
        raise ConfigurationError(
            f"state_dir {folder} cannot be written to ({error.strerror}); give a folder that can with --state-dir"
        ) from error


def _source(
    location: CheckpointLocation, settings: EvaluatorSettings, accepted: AcceptedKeys | None
) -> CheckpointSource:
    try:
        source = _run_source if location.is_run else _foreign_source
        return source(location, settings, accepted)
    except OSError as error:
        raise ConfigurationError(
            f"the checkpoints' folder {location.url or location.folder} cannot be read: {error}"
        ) from error


def _run_source(
    location: CheckpointLocation, settings: EvaluatorSettings, accepted: AcceptedKeys | None
) -> CheckpointSource:
    run_dir = RunDir(location.local_folder(settings.state_dir))
    if location.url is None:
        _say_if_missing(run_dir.checkpoints)
        return RunSource(run_dir, accepted=accepted)
    source = RemoteRunSource(open_remote(location.url), run_dir, accepted=accepted)
    _check_remote(source)
    return source


def _foreign_source(
    location: CheckpointLocation, settings: EvaluatorSettings, accepted: AcceptedKeys | None
) -> CheckpointSource:
    folder = location.local_folder(settings.state_dir)
    source = FolderSource(
        folder,
        settings.state_dir / "staging",
        takes_variables=location.experiment is not None,
        accepted=accepted,
        is_mirror=location.url is not None,
    )
    if location.url is not None:
        remote = RemoteFolderSource(open_remote(location.url), folder, source)
        _check_remote(remote)
        return remote
    _say_if_missing(folder)
    source.check()
    return source


def _check_remote(source: RemoteRunSource | RemoteFolderSource) -> None:
    """Refuse what an operator must mend; warn about storage that does not answer now."""
    try:
        source.check()
    except StorageRefusalError:
        raise
    except RemoteStorageError as error:
        _log.warning("%s; waiting for it to answer", error)


def _say_if_missing(folder: Path) -> None:
    """Warn about a missing folder: its name may be mistyped, or its writer has not started yet."""
    if not folder.is_dir():
        _log.warning("there is no folder %s; waiting for it to appear", folder)


def _cluster(location: CheckpointLocation, settings: EvaluatorSettings) -> Cluster | None:
    """Return the cluster of the settings; its nodes read the datasets from where this process reads them."""
    if settings.cluster is None:
        return None
    check_cluster(settings.cluster)
    files = {name: path.resolve() for name, path in location.eval_data.items()}
    return Cluster(address=settings.cluster, data=files, experiment=location.experiment)


def _datasets(
    location: CheckpointLocation, experiment: Experiment | None, features: Collection[str]
) -> Sequence[EvaluationDataset]:
    files = [open_dataset(name, file, features=features) for name, file in location.eval_data.items()]
    return files if experiment is None else [*datasets_of(experiment, features=features), *files]
