"""The exporter to MLflow, on a real database."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from understudy.service.events.exporter import Event, EventType, ExporterContext, load_exporter

pytestmark = [  # MLflow takes long to import, so only the process that runs these tests does
    pytest.mark.skipif(find_spec("mlflow") is None, reason="this environment is without the extra [mlflow]"),
    pytest.mark.skipif(find_spec("alembic") is None, reason="MLflow's databases need alembic and SQLAlchemy"),
    pytest.mark.filterwarnings("ignore"),  # of MLflow's libraries
]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database; MLflow takes seconds to create one."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def client(uri: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import mlflow

    for name, value in {"TRACKING_URI": uri, "EXPERIMENT_NAME": "tests"}.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    before = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    yield mlflow.MlflowClient()
    mlflow.set_tracking_uri(before[0])
    mlflow.set_registry_uri(before[1])


def context(evaluator_id: str, model_name: str = "digits") -> ExporterContext:
    def uri_of(step: int) -> str:
        return (Path("/runs/digits/checkpoints") / f"{step:012d}").as_uri()

    return ExporterContext(model_name=model_name, evaluator_id=evaluator_id, checkpoint_uri=uri_of)


def event(kind: EventType, step: int, digest: str = "", **data: Any) -> Event:
    return Event(type=kind, step=step, checkpoint_digest=digest or f"d{step}", occurred_at=1_700_000_000.0, data=data)


def runs_of(client: Any, evaluator_id: str) -> list[Any]:
    experiment = client.get_experiment_by_name("tests")
    found: list[Any] = client.search_runs(
        [experiment.experiment_id], f"tags.`understudy.evaluator_id` = '{evaluator_id}'"
    )
    return found


def test_scores_are_metrics_by_step_of_one_run_over_restarts(client: Any) -> None:
    scored = event(EventType.SCORED, 20, dataset="test", metrics={"loss": 0.5, "f1[cat<1>]": "nan", "top": "inf"})
    later = event(EventType.SCORED, 40, dataset="test", metrics={"loss": 0.25})
    exporter = load_exporter("mlflow")(context("a"))
    exporter.export(scored)
    exporter.export(scored)
    exporter.close()
    (run,) = runs_of(client, "a")
    assert run.info.status == "FINISHED"

    exporter = load_exporter("mlflow")(context("a"))
    exporter.export(later)
    exporter.export(event(EventType.COMMITTED, 50))
    (run,) = runs_of(client, "a")
    assert (run.info.status, run.info.run_name) == ("RUNNING", "digits")
    exporter.close()

    history = client.get_metric_history(run.info.run_id, "test/loss")
    assert [(point.step, point.value, point.timestamp) for point in history] == [
        (20, 0.5, 1_700_000_000_000),
        (40, 0.25, 1_700_000_000_000),
    ]
    assert math.isnan(client.get_metric_history(run.info.run_id, "test/f1_cat_1__")[0].value)
    assert client.get_metric_history(run.info.run_id, "test/top")[0].value > 1e300


def test_thousands_of_metrics_are_written(client: Any) -> None:
    exporter = load_exporter("mlflow")(context("many"))
    exporter.export(event(EventType.SCORED, 1, dataset="test", metrics={f"m{number}": 1.0 for number in range(1500)}))
    exporter.close()

    (run,) = runs_of(client, "many")
    assert len(run.data.metrics) == 1500


def test_a_promotion_registers_the_checkpoint_and_moves_the_alias(client: Any) -> None:
    exporter = load_exporter("mlflow")(context("b", "it's a/model"))
    name = "it_s a_model"

    def serving() -> tuple[str, dict[str, str], str]:
        version = client.get_model_version_by_alias(name, "serving")
        return version.version, version.tags, version.source

    first, second = event(EventType.PROMOTED, 20), event(EventType.PROMOTED, 40)
    exporter.export(first)
    assert [str(serving()[0]), *serving()[1:]] == [
        "1",
        {
            "understudy.step": "20",
            "understudy.checkpoint_digest": "d20",
            "understudy.checkpoint_uri": "file:///runs/digits/checkpoints/000000000020",
        },
        "file:///runs/digits/checkpoints/000000000020",
    ]
    exporter.export(second)
    exporter.export(second)
    assert serving()[1]["understudy.step"] == "40"
    exporter.export(event(EventType.ROLLED_BACK, 20))
    assert serving()[1]["understudy.step"] == "20"
    assert len(client.search_model_versions(f"name = '{name}'")) == 2
    exporter.export(event(EventType.PROMOTED, 20, digest="of a new training"))
    assert len(client.search_model_versions(f"name = '{name}'")) == 3
    exporter.close()


def test_a_folder_that_a_server_refuses_as_the_source_is_in_a_tag(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

    create = mlflow.MlflowClient.create_model_version

    def as_a_server_does(self: Any, name: str, source: str, **options: Any) -> Any:
        if source.startswith("file:"):
            raise MlflowException(f"Invalid model version source: '{source}'.", INVALID_PARAMETER_VALUE)
        return create(self, name, source, **options)

    monkeypatch.setattr(mlflow.MlflowClient, "create_model_version", as_a_server_does)
    exporter = load_exporter("mlflow")(context("c", "remote"))
    exporter.export(event(EventType.PROMOTED, 20))
    exporter.export(event(EventType.PROMOTED, 20))
    exporter.close()

    (version,) = client.search_model_versions("name = 'remote'")
    assert client.get_model_version_by_alias("remote", "serving").version == version.version
    assert version.tags["understudy.checkpoint_uri"] == "file:///runs/digits/checkpoints/000000000020"
    (run,) = runs_of(client, "c")
    assert version.source == f"runs:/{run.info.run_id}/checkpoints/20"
