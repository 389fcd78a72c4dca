"""The command as a whole: what is listed, what is suggested, what is missing."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest
from click.testing import CliRunner, Result

from understudy.cli.main import main

CLIENT_COMMANDS = ["predict", "evaluate", "status", "top", "watch", "promote", "health"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_help_lists_every_command() -> None:
    result = run("--help")

    assert result.exit_code == 0
    for name in ["train", "serve", "run", "demo", *CLIENT_COMMANDS]:
        assert f"\n  {name} " in result.stdout


def test_the_version_is_the_distribution_s() -> None:
    assert run("--version").stdout.startswith("understudy, version ")


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["sevre"], "No such command 'sevre'. Did you mean 'serve'?"),
        (["qqq"], "No such command 'qqq'. There are train, publish, serve,"),
        (["status", "--jsn"], "No such option '--jsn'. Did you mean '--json'?"),
        (["status", "localhost:8500"], "argument (localhost:8500). The address of a server is given by --target"),
        (["--verson"], "No such option '--verson'. Did you mean '--version'?"),
    ],
)
def test_what_is_mistyped_is_answered_with_what_comes_close(arguments: list[str], suggestion: str) -> None:
    result = run(*arguments)

    assert result.exit_code == 2
    assert suggestion in " ".join(result.stderr.split())


@pytest.mark.parametrize("name", CLIENT_COMMANDS)
def test_every_client_command_explains_itself(name: str) -> None:
    result = run(name, "--help")

    assert result.exit_code == 0
    assert "--target" in result.stdout


@pytest.mark.parametrize(("name", "level"), [("serve", "1"), ("train", "1"), ("evaluate", "2")])
def test_tensorflow_logs_what_helps_unless_the_user_chose(
    name: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    run(name, "--help")
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"

    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    run(name, "--help")
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == level


def test_models_run_on_tensorflow_whatever_the_backend_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert "KERAS_BACKEND=jax does not count here" in run("serve", "--help").stderr
    assert os.environ["KERAS_BACKEND"] == "tensorflow"
    assert not run("serve", "--help").stderr


def test_a_command_whose_extra_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # what importlib does for a module that is not there
    module = ModuleType("understudy.cli.train")

    @click.command("train")
    def command() -> None:
        importlib.import_module("tensorflow.keras")

    module.command = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "understudy.cli.train", module)

    result = run("train")

    assert result.exit_code == 1
    assert result.stderr == (
        "Error: this command needs tensorflow, which is not installed; "
        "install it with: pip install 'understudy[server]'\n"
    )


def test_traces_without_their_extra_say_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.startswith("understudy.service.tracing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.environment_variables", None)

    result = run("serve", "--run-dir", str(tmp_path), "--grpc-port", "0", "--http-port", "0", "--tracing")

    assert result.exit_code == 1
    assert "install it with: pip install 'understudy[otel]'" in result.stderr


def test_a_missing_module_of_somebody_else_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("understudy.cli.train")

    @click.command("train")
    def command() -> None:
        importlib.import_module("no_such_module_at_all")

    module.command = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "understudy.cli.train", module)

    assert isinstance(run("train").exception, ModuleNotFoundError)
