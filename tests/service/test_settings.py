from __future__ import annotations

import pwd
from pathlib import Path
from typing import Any, NoReturn

import pytest

from understudy.service.service_errors import SettingsError
from understudy.service.settings import ServeSettings

RUN = Path("run")


def test_the_ports_are_those_of_tensorflow_serving() -> None:
    settings = ServeSettings(run_dir=RUN)
    assert (settings.host, settings.grpc_port, settings.http_port) == ("127.0.0.1", 8500, 8501)


@pytest.mark.parametrize("given", [{}, {"run_dir": RUN, "checkpoints": RUN}])
def test_exactly_one_folder_of_checkpoints_is_needed(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="--run-dir and --checkpoints"):
        ServeSettings(**given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grpc_port", -1),
        ("http_port", 65536),
        ("max_message_mib", 0),
        ("max_message_mib", 2048),
        ("stream_depth", 0),
        ("drain_seconds", -0.5),
        ("drain_seconds", float("nan")),
        ("request_log_sample", 0),
        ("request_log_sample", 1.5),
        ("request_log_mib", 0),
        ("request_log_hours", -1),
        ("drift_sample", float("nan")),
        ("drift_hours", 0),
        ("drift_max_features", 0),
        ("tracing_sample", 1.5),
        ("tracing_sample", float("nan")),
        ("tracing_endpoint", "collector:4318"),
        ("tracing_endpoint", "http://["),
        ("tracing_endpoint", "http://:4318"),
        ("tracing_endpoint", "http://collector:99999"),
        ("event_retry_hours", -1),
    ],
)
def test_a_value_out_of_range_is_named_with_what_was_expected(name: str, value: float | str) -> None:
    arguments: dict[str, Any] = {name: value}
    with pytest.raises(SettingsError, match=f"^{name} is .*; give "):
        ServeSettings(run_dir=RUN, **arguments)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"webhook": ("ftp://example.com",)}, r"^webhook is no URL"),
        ({"webhook": ("http://a/b", "http://user@a/b")}, "a destination twice"),
        ({"webhook": ("http://a/b",), "webhook_events": ("served",)}, "holds 'served'; there are committed, scored"),
        ({"webhook_events": ("scored",)}, "webhook_events is given without webhook"),
        ({"webhook_secret_file": RUN}, "webhook_secret_file is given without webhook"),
        ({"exporter": tuple(map(str, range(17)))}, "give at most 16"),
    ],
)
def test_destinations_that_cannot_be_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        ServeSettings(run_dir=RUN, **given)


def test_redaction_without_a_log_is_refused() -> None:
    with pytest.raises(SettingsError, match="redact"):
        ServeSettings(run_dir=RUN, request_log_redact=("user",))
    ServeSettings(run_dir=RUN, request_log_redact=("user",), drift_reference="test")


@pytest.mark.parametrize("given", [{"tracing_sample": 0.5}, {"tracing_endpoint": "http://collector:4318"}])
def test_settings_of_traces_without_traces_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="without tracing"):
        ServeSettings(run_dir=RUN, **given)
    ServeSettings(run_dir=RUN, tracing=True, **given)


@pytest.mark.parametrize("path", ["models", "/models/", "//models", "/..", '/a"b', "/a b", "https://example.com/a"])
def test_a_root_path_is_a_plain_path(path: str) -> None:
    with pytest.raises(SettingsError, match="begins with a slash"):
        ServeSettings(run_dir=RUN, root_path=path)


def test_one_port_cannot_serve_both_protocols() -> None:
    with pytest.raises(SettingsError, match="both 9000"):
        ServeSettings(run_dir=RUN, grpc_port=9000, http_port=9000)
    ServeSettings(run_dir=RUN, grpc_port=0, http_port=0)


def test_a_message_is_measured_in_mebibytes() -> None:
    assert ServeSettings(run_dir=RUN, max_message_mib=2).max_message_bytes == 2 * 1024 * 1024


@pytest.mark.parametrize(("frontend", "mib"), [("grpcio", 10), ("envoy", 256)])
def test_the_largest_message_depends_on_what_copying_it_costs(frontend: str, mib: int) -> None:
    assert ServeSettings(run_dir=RUN, frontend=frontend).max_message_bytes == mib * 1024 * 1024


def test_the_state_of_a_run_is_in_its_folder() -> None:
    assert ServeSettings(run_dir=RUN).evaluator_state_dir == RUN / "evaluator"


def test_the_state_of_somebody_elses_folder_is_elsewhere_and_always_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    states = {ServeSettings(checkpoints=tmp_path / name).evaluator_state_dir for name in ("a", "b", "a")}
    assert {state.parent for state in states} == {tmp_path / "state" / "understudy"}
    assert len(states) == 2


def test_a_chosen_state_folder_goes_before_all() -> None:
    assert ServeSettings(run_dir=RUN, state_dir=Path("here")).evaluator_state_dir == Path("here")


def test_a_user_without_a_home_folder_is_asked_for_the_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(user: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", no_entry)

    with pytest.raises(SettingsError, match="no home folder; give --state-dir"):
        _ = ServeSettings(checkpoints=RUN).evaluator_state_dir
    assert ServeSettings(checkpoints=RUN, state_dir=Path("here")).evaluator_state_dir == Path("here")


def test_checkpoints_may_lie_at_a_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = ServeSettings(checkpoints=Path("gs://bucket/run"))
    state = settings.evaluator_state_dir
    monkeypatch.chdir(tmp_path)
    assert settings.location.url == "gs://bucket/run"
    assert settings.evaluator_state_dir == state
    assert ServeSettings(checkpoints=tmp_path).location.url is None
