from __future__ import annotations

from pathlib import Path

import pytest

from understudy.evaluator.records.events import Event, EventType
from understudy.service.events.exporter import ExporterContext, load_exporter, metrics_of
from understudy.service.events.webhook import Webhook, destinations_of
from understudy.service.events.webhook_settings import SECRET_VARIABLE
from understudy.service.service_errors import SettingsError
from understudy.service.settings import ServeSettings

CONTEXT = ExporterContext(model_name="digits", evaluator_id="e", checkpoint_uri=str)


def test_an_exporter_is_found_by_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own_exporter.py").write_text(
        "class Own:\n    def __init__(self, context):\n        self.c = context\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made = load_exporter("own_exporter:Own")(CONTEXT)
    assert made.c is CONTEXT  # type: ignore[attr-defined] # the class above

    for name, reason in (("own_exporter:Missing", "has no attribute"), ("missing_module:Own", "No module named")):
        with pytest.raises(SettingsError, match=f"exporter '{name}' cannot be loaded: .*{reason}"):
            load_exporter(name)


def test_an_exporter_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(SettingsError, match=r"exporter is 'mlfow'; give package\.module:object, or one of .*mlflow"):
        load_exporter("mlfow")


def test_the_metrics_of_a_score_are_named_by_its_dataset() -> None:
    data = {"dataset": "test", "metrics": {"loss": 0.5, "f1": "nan"}}
    event = Event(type=EventType.SCORED, step=1, checkpoint_digest="d", occurred_at=0.0, data=data)

    metrics = metrics_of(event)
    assert metrics["test/loss"] == 0.5
    assert str(metrics["test/f1"]) == "nan"


def test_a_value_that_cannot_be_compared_with_the_first_ones_is_a_metric_of_its_own() -> None:
    data = {"dataset": "test", "metrics": {"loss": 0.5, "top": 0.25}, "curves": {"top": "test-55555555"}}
    event = Event(type=EventType.SCORED, step=1, checkpoint_digest="d", occurred_at=0.0, data=data)

    assert metrics_of(event) == {"test/loss": 0.5, "test-55555555/top": 0.25}


def test_the_settings_name_the_destinations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    (tmp_path / "own_exporter.py").write_text("Own = print\n")
    monkeypatch.syspath_prepend(tmp_path)
    webhooks = ("https://example.com/a", "http://127.0.0.1:1/b")
    settings = ServeSettings(
        run_dir=tmp_path, webhook=webhooks, webhook_events=("refused",), exporter=("own_exporter:Own",)
    )

    found = destinations_of(settings)
    *posts, own = found.subscriptions
    assert {each.types for each in posts} == {frozenset({EventType.REFUSED})}
    assert (own.destination, own.types) == ("own_exporter:Own", frozenset(EventType))
    makers = found.makers(CONTEXT)
    assert isinstance(makers[posts[0].destination](), Webhook)
    assert not destinations_of(ServeSettings(run_dir=tmp_path)).subscriptions

    monkeypatch.delenv(SECRET_VARIABLE)
    with pytest.raises(SettingsError, match="needs a secret"):
        destinations_of(settings)
