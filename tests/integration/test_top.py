"""`understudy top` beside a real server: what it shows once, on a terminal, and while the server starts again."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import generate_latest

from testkit.checkpoints import Chief, ones
from testkit.in_process import RunningService, running_service, until
from testkit.ports import free_ports
from understudy.checkpoints.layout import RunDir
from understudy.checkpoints.training import TrainingJournal, TrainingProgress
from understudy.cli.main import main
from understudy.cli.top import parse_series

WAIT_SECONDS = 150
LEAVES_SCREEN = "\x1b[?1049l"


@contextmanager
def serving(run: Path, data: Path, replicas: tuple[str, ...], ports: list[int]) -> Iterator[RunningService]:
    grpc_port, http_port = ports
    settings: dict[str, Any] = {
        "run_dir": run,
        "eval_data": {"test": data},
        "grpc_port": grpc_port,
        "http_port": http_port,
    }
    with running_service(
        settings, {"gate": ("test/loss <= 12",)}, replicas=replicas, state_dir=run / "evaluator"
    ) as service:
        service.wait_ready()
        yield service


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, replicas: tuple[str, ...], dataset_file: Path
) -> Iterator[RunningService]:
    """A server whose gate accepted one checkpoint and refused the next."""
    run = tmp_path_factory.mktemp("run")
    chief = Chief(run)
    chief.publish(30)
    journal = TrainingJournal(RunDir(run))
    journal.record_step(50, TrainingProgress(steps=200, metrics={"loss": 0.25}, remaining_seconds=90.0))
    with journal, serving(run, dataset_file, replicas, [0, 0]) as service:
        chief.publish(40)
        until(lambda: any(each.outcome == "refused" for each in service.client().list_evaluations()))
        service.client().predict(ones(3))
        yield service


def top(service: RunningService, *flags: str) -> str:
    result = CliRunner().invoke(main, ["top", "--target", service.grpc, *flags], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_once_shows_what_is_served_and_why_with_scores_and_traffic(running: RunningService) -> None:
    shown = top(running, "--once")

    assert re.search(r"^serving +step 30: the gate accepted step 30", shown, re.MULTILINE)
    assert re.search(r"^next +the gate refused step 40", shown, re.MULTILINE)
    assert re.search(
        r"^training +running at step 50 of 200, loss 0.25, .* left, last checkpoint .* ago *$", shown, re.MULTILINE
    )
    assert re.search(r"^traffic +0 failed since the start, p50 .*, p99 .*, 0 examples queued; \d+", shown, re.MULTILINE)
    assert re.search(r"^devices +3 replicas", shown, re.MULTILINE)
    assert re.search(r"^30 +AVAILABLE +serving best +test: loss", shown, re.MULTILINE)
    assert "\x1b" not in shown


def test_json_has_the_same(running: RunningService) -> None:
    (found,) = map(json.loads, top(running, "--once", "--json").splitlines())

    assert found["serving"]["step"] == 30
    assert found["serving"]["why"].startswith("the gate accepted step 30")
    assert [each["step"] for each in found["versions"]] == [40, 30]
    assert {each["outcome"] for each in found["evaluations"]} == {"scored", "accepted", "refused"}
    assert found["traffic"]["replicas"] == 3
    assert (found["training"]["state"], found["training"]["step"], found["training"]["loss"]) == ("running", 50, 0.25)


def test_a_server_that_is_gone_is_an_error_at_once() -> None:
    (port,) = free_ports(1)
    result = CliRunner().invoke(main, ["top", "--once", "--target", f"127.0.0.1:{port}", "--timeout-seconds", "2"])

    assert result.exit_code == 1
    assert f"127.0.0.1:{port}" in result.stderr


def test_the_screen_follows_a_server_over_its_restart_and_ctrl_c_ends_it(
    tmp_path: Path, dataset_file: Path, replicas: tuple[str, ...]
) -> None:
    Chief(tmp_path).publish(30)
    own_ports = free_ports(2)
    with terminal("--target", f"127.0.0.1:{own_ports[0]}", "--interval", "0.2", "--timeout-seconds", "1") as screen:
        screen.wait_for("no answer since")
        for _ in range(2):
            with serving(tmp_path, dataset_file, replicas, own_ports):
                screen.forget()
                screen.wait_for("step 30: the gate accepted step 30")
            screen.forget()
            screen.wait_for("no answer since")
        screen.interrupt()
        assert screen.exit_status() == 0
        screen.wait_for(LEAVES_SCREEN)
        assert "Traceback" not in screen.everything


class Screen:
    """A program on a terminal of 160 columns, whose output a thread reads."""

    def __init__(self, *flags: str) -> None:
        self._own, other = pty.openpty()
        environment = {**os.environ, "COLUMNS": "160", "LINES": "40", "TERM": "xterm"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "understudy.cli", "top", *flags],
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            start_new_session=True,
        )
        os.close(other)
        self._changed = threading.Condition()
        self._seen_until = 0
        self.everything = ""
        self._thread = threading.Thread(target=self._read, name="screen-under-test")
        self._thread.start()

    def wait_for(self, text: str) -> None:
        """Wait until the program has written a text since `forget`."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: text in self.everything[self._seen_until :], WAIT_SECONDS)
        assert arrived, self.everything[-2000:]

    def forget(self) -> None:
        """Look only at what is written from now on."""
        with self._changed:
            self._seen_until = len(self.everything)

    def interrupt(self) -> None:
        """Do what Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def exit_status(self) -> int:
        """Wait for the end of the program."""
        return self._process.wait(WAIT_SECONDS)

    def close(self) -> None:
        """End the program if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        os.close(self._own)

    def _read(self) -> None:
        ended_at = None
        while ended_at is None or time.monotonic() < ended_at + 0.2:
            if ended_at is None and self._process.poll() is not None:
                ended_at = time.monotonic()
            if not select.select([self._own], [], [], 0.05)[0]:
                continue
            try:
                text = os.read(self._own, 65536).decode(errors="replace")
            except OSError:  # the other side is closed
                return
            with self._changed:
                self.everything += text
                self._changed.notify_all()


@contextmanager
def terminal(*flags: str) -> Iterator[Screen]:
    screen = Screen(*flags)
    try:
        yield screen
    finally:
        screen.close()


def test_the_series_are_those_of_the_exposition_with_every_character_of_their_labels() -> None:
    registry = CollectorRegistry()
    counter = Counter("understudy_strange", "-", ["name", "other"], registry=registry)
    names = ['a"b', "a\\b", "a\nb", "a\\nb", "}, {", "", "ä,=", 'x="y"']
    for number, name in enumerate(names):
        counter.labels(name, "z").inc(number)
    found = list(parse_series(generate_latest(registry).decode()))

    values = {each.labels["name"]: each.value for each in found if each.name == "understudy_strange_total"}
    assert values == {name: float(number) for number, name in enumerate(names)}
    assert all(each.labels["other"] == "z" for each in found)
