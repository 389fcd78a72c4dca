"""What the operator's settings mean for the components. Imports TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from understudy.checkpoints.local_checkpoint import LocalCheckpoint
from understudy.evaluator.batching.engine import EngineSettings
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluation.breakdown import BreakdownOptions
from understudy.evaluator.evaluation.slices import check_columns, parse_slices
from understudy.evaluator.evaluator_errors import ConfigurationError, InvalidInputError
from understudy.evaluator.model.devices import DeviceSettings
from understudy.evaluator.serving.gates import Gate, build_gate, further_dataset
from understudy.evaluator.serving.ranking import Monitor, parse_monitor
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.tuning.choice import FoundSettings, Threads
from understudy.evaluator.tuning.trial import TrialRequest
from understudy.evaluator.tuning.tuning_file import TuningStart

_MILLISECONDS = 1000.0


@dataclass(frozen=True, kw_only=True)
class ScoringPlan:
    """What checkpoints are scored on, and what the scores decide.

    Attributes:
        datasets: The datasets that every checkpoint is scored on; without the one for undecided checkpoints.
        breakdown: What is computed besides the metrics.
        monitor: The metric that ranks the checkpoints; None without datasets.
        gate: What a checkpoint must meet before it is served; None if there is no such condition.
    """

    datasets: tuple[EvaluationDataset, ...]
    breakdown: BreakdownOptions
    monitor: Monitor | None
    gate: Gate | None

    @classmethod
    def of(cls, settings: EvaluatorSettings, datasets: Sequence[EvaluationDataset]) -> ScoringPlan:
        """Return the plan of the settings.

        Raises:
            ConfigurationError: The settings contradict each other or the datasets.
        """
        further = further_dataset(settings, _unique_names(datasets))
        scored = tuple(dataset for dataset in datasets if dataset.name != further)
        names = [dataset.name for dataset in scored]
        monitor = parse_monitor(settings.monitor, settings.monitor_mode, names)
        breakdown = breakdown_options(settings)
        _check_slices(breakdown, datasets)
        sliced = [tuple(feature.name for feature in setting.features) for setting in breakdown.slices]
        gate = build_gate(settings, monitor, names, slices=sliced)
        if gate is not None:
            breakdown = dataclasses.replace(breakdown, resamples=gate.resamples(breakdown.resamples))
        return cls(datasets=scored, breakdown=breakdown, monitor=monitor, gate=gate)

    @property
    def monitored_content(self) -> str:
        """The digest of the monitored dataset; empty if there is none."""
        monitored = None if self.monitor is None else self.monitor.dataset
        return next((dataset.digest for dataset in self.datasets if dataset.name == monitored), "")


def breakdown_options(settings: EvaluatorSettings) -> BreakdownOptions:
    """Return what recorded evaluations compute besides the metrics.

    Raises:
        ConfigurationError: A slice setting cannot be used, or a number is out of its range.
    """
    try:
        return BreakdownOptions(
            slices=parse_slices(settings.slice),
            slice_min_examples=settings.slice_min_examples,
            resamples=settings.resamples,
            confidence=settings.confidence,
            lenient=True,
        )
    except InvalidInputError as error:
        raise ConfigurationError(str(error)) from error


def _check_slices(breakdown: BreakdownOptions, datasets: Iterable[EvaluationDataset]) -> None:
    try:
        check_columns(breakdown.slices, (dataset.columns for dataset in datasets))
    except InvalidInputError as error:
        raise ConfigurationError(str(error)) from error


def _unique_names(datasets: Sequence[EvaluationDataset]) -> list[str]:
    names = [dataset.name for dataset in datasets]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"the datasets are called {names}; give each a name of its own")
    return names


def device_settings(settings: EvaluatorSettings, tuning: TuningStart | None = None) -> DeviceSettings:
    """Return the device settings, with the threads that were found where none are given.

    They are for `understudy.evaluator.model.devices.build_strategy`.
    """
    found = Threads() if tuning is None or tuning.found is None else tuning.found.threads
    return DeviceSettings(
        devices=settings.devices,
        logical_cpus=settings.logical_cpus,
        gpu_memory_limit_mib=settings.gpu_memory_limit_mib,
        precision=settings.precision,
        intra_op_threads=settings.intra_op_threads,
        inter_op_threads=settings.inter_op_threads,
        default_intra_op_threads=found.intra_op,
        default_inter_op_threads=found.inter_op,
    )


def engine_settings(
    settings: EvaluatorSettings, devices: Sequence[str], found: FoundSettings | None = None
) -> EngineSettings:
    """Return the batch settings for these devices, which have the names of `tf.distribute`.

    What was found counts where nothing is given.
    """
    found = found or FoundSettings()
    cpus_only = all(tf.DeviceSpec.from_string(name).device_type == "CPU" for name in devices)
    given_delay = settings.max_batch_delay_ms
    return EngineSettings(
        max_batch_size=min(settings.max_batch_size or found.max_batch_size, settings.max_queue_examples) * len(devices),
        max_queue_examples=settings.max_queue_examples,
        max_queue_bytes=settings.max_queue_mib << 20,
        max_batch_delay_seconds=(given_delay or 0.0) / _MILLISECONDS,
        gathering_seconds=found.gathering_seconds if given_delay is None and cpus_only else 0.0,
        max_device_failures=settings.max_device_failures,
        inline_batches=settings.inline_batches and cpus_only,
        concurrent_batches=(settings.concurrent_batches or found.concurrent_batches) if cpus_only else 1,
        overlap_batches=not cpus_only,
    )


def trial_request(
    settings: EvaluatorSettings, experiment: str | None, checkpoint: LocalCheckpoint, threads: Threads
) -> TrialRequest:
    """Return a trial of a checkpoint with some threads, otherwise with the service's settings."""
    return TrialRequest(
        model_file=str(checkpoint.model_file),
        kind=checkpoint.kind.value,
        experiment=experiment,
        allow_unsafe_models=settings.allow_unsafe_models,
        devices=settings.devices,
        logical_cpus=settings.logical_cpus,
        frozen_memory_mib=settings.frozen_memory_mib,
        threads=threads,
        pairs=settings.concurrent_batches != 1,
    )
