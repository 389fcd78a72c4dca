"""The exporter to MLflow: scores as metrics of a run, and the serving checkpoint as an alias of a registered model."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any, Final

from understudy.service.events.exporter import Event, EventType, ExporterContext, metrics_of

if importlib.util.find_spec("mlflow") is None:  # it is imported late, as that takes seconds
    raise ModuleNotFoundError("MLflow is not installed")

ALIAS: Final = "serving"
"""The alias of the model version that serves."""

EVALUATOR_TAG: Final = "understudy.evaluator_id"
STEP_TAG: Final = "understudy.step"
DIGEST_TAG: Final = "understudy.checkpoint_digest"
PLACE_TAG: Final = "understudy.checkpoint_uri"

_DEFAULT_EXPERIMENT: Final = "understudy"
_MOST_METRICS: Final = 1000
"""How many metrics MLflow takes in one call."""
_LONGEST_NAME: Final = 250
_REPLACED: Final = re.compile(r"[^\w\-. :/]", re.ASCII)
_EXISTS: Final = "RESOURCE_ALREADY_EXISTS"
_REFUSED: Final = "INVALID_PARAMETER_VALUE"
_FOLDER: Final = "file:"


class MlflowExporter:
    """An `understudy.service.events.exporter.Exporter`. For one thread.

    It reads MLflow's own variables: ``MLFLOW_TRACKING_URI``, ``MLFLOW_REGISTRY_URI``, ``MLFLOW_EXPERIMENT_NAME``
    (``understudy`` by default) and those for credentials. An evaluator has one run, also over restarts. Each score is a
    metric ``DATASET/METRIC`` at the checkpoint's step; characters that MLflow does not take become underscores. A
    checkpoint that is promoted becomes a version of the registered model with the model's name, has its place, step
    and digest as tags, and the alias ``serving``. Its source is its place, too, unless that is a folder and MLflow is
    a server: servers refuse folders that are not the run's, and the source is then one of the run, without files.
    An event that comes twice changes nothing.

    Args:
        context: What is exported.

    Raises:
        MlflowException: The tracking server does not answer.
    """

    def __init__(self, context: ExporterContext) -> None:
        from mlflow import MlflowClient

        self._context = context
        self._client = MlflowClient()
        self._run_id = self._find_run()

    def export(self, event: Event) -> None:
        """Write a score, or move the alias; other events are ignored.

        Raises:
            MlflowException: The server does not answer, or refused.
        """
        if event.type is EventType.SCORED:
            self._log_scores(event)
        elif event.type in (EventType.PROMOTED, EventType.ROLLED_BACK):
            self._move_alias(event)

    def close(self) -> None:
        """Mark the run as finished; the next start resumes it."""
        self._client.set_terminated(self._run_id)

    def _find_run(self) -> str:
        """Return the evaluator's run, which is created the first time."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _DEFAULT_EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        found = self._client.search_runs(
            [experiment_id], f"tags.`{EVALUATOR_TAG}` = '{self._context.evaluator_id}'", max_results=1
        )
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
            return str(found[0].info.run_id)
        tags = {EVALUATOR_TAG: self._context.evaluator_id}
        return str(self._client.create_run(experiment_id, tags=tags, run_name=self._context.model_name).info.run_id)

    def _log_scores(self, event: Event) -> None:
        from mlflow.entities import Metric

        at = int(event.occurred_at * 1000)
        metrics = [
            Metric(_REPLACED.sub("_", name)[:_LONGEST_NAME], value, at, event.step)
            for name, value in metrics_of(event).items()
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_METRICS])

    def _move_alias(self, event: Event) -> None:
        from mlflow.exceptions import MlflowException

        name = _registered_name(self._context.model_name)
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != _EXISTS:
                raise
        self._client.set_registered_model_alias(name, ALIAS, self._version(name, event))

    def _version(self, name: str, event: Event) -> Any:
        """Return the version of a checkpoint, which is created the first time."""
        from mlflow.exceptions import MlflowException

        found = self._client.search_model_versions(
            f"name = '{name}' and tags.`{DIGEST_TAG}` = '{event.checkpoint_digest}' and "
            f"tags.`{STEP_TAG}` = '{event.step}'"
        )
        if found:
            return found[0].version
        place = self._context.checkpoint_uri(event.step)
        tags = {STEP_TAG: str(event.step), DIGEST_TAG: event.checkpoint_digest, PLACE_TAG: place}
        try:
            return self._client.create_model_version(name, place, run_id=self._run_id, tags=tags).version
        except MlflowException as error:
            if error.error_code != _REFUSED or not place.startswith(_FOLDER):
                raise
        source = f"runs:/{self._run_id}/checkpoints/{event.step}"
        return self._client.create_model_version(name, source, run_id=self._run_id, tags=tags).version


def _registered_name(model_name: str) -> str:
    """Return a name that MLflow's filters can hold in quotes."""
    return re.sub(r"['\"/:.]", "_", model_name)
