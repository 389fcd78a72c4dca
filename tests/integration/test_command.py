"""``understudy serve`` as a process of its own."""

from __future__ import annotations

import http
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import keras
import numpy as np
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from testkit.checkpoints import OUTPUTS, WIDTH, Chief, ones, step_model, write_dataset
from testkit.front_ends import FRONT_ENDS, needs_envoy
from testkit.in_process import until
from testkit.ports import HAS_IPV6
from testkit.preloading import HEEDING_HANGUP, preloaded
from understudy.checkpoints import RunDir, TrainingJournal
from understudy.cli.main import main
from understudy.clients import Client
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.serving.decision_file import DECISION_FILE
from understudy.evaluator.types import EvaluationRecord
from understudy.v1 import prediction_pb2_grpc

pytestmark = pytest.mark.long

START_SECONDS = 200.0
END_SECONDS = 100.0
FREE_PORTS = ("--grpc-port=0", "--http-port=0")

Start = Callable[..., "ServeProcess"]


class ServeProcess:
    """A running ``understudy serve``."""

    def __init__(self, *arguments: str | Path, state_home: Path, prefix: Sequence[str], in_terminal: bool) -> None:
        environ = {} if in_terminal else preloaded()  # whose processes are not in this one's group
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "understudy.cli", "serve", *map(str, arguments)],
            env={**os.environ, **environ, "XDG_STATE_HOME": str(state_home), "TF_CPP_MIN_LOG_LEVEL": "2"},
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, word: str) -> re.Match[str]:
        """Wait for the line that begins with a word, and take it apart."""
        watchdog = threading.Timer(START_SECONDS, self._process.kill)
        watchdog.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if match := re.match(rf"{word} grpc=(\S+) http=(\S+)(?: step=(\d+))?$", line):
                    return match
        finally:
            watchdog.cancel()
        raise AssertionError(f"it ended before it said {word}: {self.end()[1]}")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def has_ended_by(self, number: signal.Signals) -> bool:
        """Send a signal, and return whether the process has ended."""
        self._process.send_signal(number)
        return self._process.poll() is not None

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal as a terminal does, to all processes."""
        os.killpg(self._process.pid, number)

    def end(self) -> tuple[int, str]:
        """Wait until it ends; return its exit status and what it wrote to standard error."""
        _, errors = self._process.communicate(timeout=END_SECONDS)
        return self._process.returncode, errors

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture(params=FRONT_ENDS)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    processes = []

    def start(*arguments: str | Path, prefix: Sequence[str] = (), in_terminal: bool = False) -> ServeProcess:
        front_end = f"--frontend={request.param}"
        process = ServeProcess(
            *(*arguments, front_end, *FREE_PORTS),
            state_home=tmp_path / "state",
            prefix=prefix,
            in_terminal=in_terminal,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()


def train_plainly(folder: Path) -> int:
    """Run a plain script's ``fit`` with `ModelCheckpoint`; return the step of the last file."""
    folder.mkdir()
    random = np.random.default_rng(0)
    x = random.normal(size=(32, WIDTH)).astype(np.float32)
    y = random.normal(size=(32, OUTPUTS)).astype(np.float32)
    saving = keras.callbacks.ModelCheckpoint(str(folder / "epoch-{epoch}.keras"))
    step_model(3).fit(x, y, epochs=2, batch_size=8, callbacks=[saving], verbose=0)
    return 8


def test_a_folder_of_plain_keras_files_is_served_and_scored_and_sigterm_loses_no_answer(
    tmp_path: Path, start: Start
) -> None:
    last_step = train_plainly(tmp_path / "saved")
    arrays = write_dataset(tmp_path / "test.npz", best_step=3)
    process = start(
        *("--checkpoints", tmp_path / "saved", "--eval-data", f"test={tmp_path / 'test.npz'}"),
        *("--logical-cpus", "2", "--max-batch-delay-ms", "700", "--host", "::1" if HAS_IPV6 else "127.0.0.1"),
    )
    target, page = process.wait_for("READY").group(1, 2)
    with urllib.request.urlopen(f"http://{page}/readyz", timeout=START_SECONDS) as response:
        assert response.status == http.HTTPStatus.OK
    trained = keras.models.load_model(tmp_path / "saved" / "epoch-2.keras")
    expected = trained.evaluate(arrays["x"], arrays["y"], batch_size=len(arrays["x"]), verbose=0, return_dict=True)
    with Client(target) as client, ThreadPoolExecutor(8) as pool:
        (scored,) = [next(entry for entry in client.watch_evaluations() if entry.step == last_step)]
        assert dict(scored.metrics) == pytest.approx(expected, rel=1e-6)
        assert client.metadata().replicas == 2
        answers = [pool.submit(client.predict, {"x": ones(1)}) for _ in range(8)]
        until(lambda: "understudy_queue_examples 8.0" in client.metrics())
        process.send(signal.SIGTERM)
        rows = trained.predict(ones(1), verbose=0)
        for answer in answers:
            assert answer.result().step == last_step
            np.testing.assert_allclose(answer.result().output, rows, rtol=1e-5)
    status, errors = process.end()
    assert status == 0, errors
    assert "Traceback" not in errors


@contextmanager
def stream_under_way(target: str) -> Iterator[tuple[Callable[[], list[Any]], Any]]:
    """Begin a stream of predictions and a watch of the health; yield a function that ends the one, and the other."""
    gone = threading.Event()
    with grpc.insecure_channel(target) as channel:
        stub: Any = prediction_pb2_grpc.PredictionServiceStub(channel)
        stream = stub.PredictStream(iter(gone.wait, True))
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING

        def finish() -> list[Any]:
            gone.set()
            return list(stream)

        try:
            yield finish, watch
        finally:
            gone.set()
            stream.cancel()


def test_a_second_signal_ends_it_at_once(tmp_path: Path, start: Start) -> None:
    process = start("--run-dir", tmp_path / "run", in_terminal=True)  # several signals meet the end of the program
    target = process.wait_for("LISTENING")[1]
    with stream_under_way(target) as (_, watch):
        process.send(signal.SIGINT)
        assert list(watch) == []
        until(lambda: process.has_ended_by(signal.SIGTERM))
        status, _ = process.end()
    assert status == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_to_all_its_processes_ends_it_in_order(tmp_path: Path, start: Start, number: signal.Signals) -> None:
    Chief(tmp_path / "run").publish(1)
    process = start("--run-dir", tmp_path / "run", prefix=HEEDING_HANGUP, in_terminal=True)
    process.wait_for("READY")
    process.signal_group(number)
    status, errors = process.end()
    assert status == 0, errors
    assert "Traceback" not in errors


def test_a_signal_that_comes_twice_at_once_is_one(tmp_path: Path, start: Start) -> None:
    process = start("--run-dir", tmp_path / "run")
    target = process.wait_for("LISTENING")[1]
    with stream_under_way(target) as (finish, watch):
        process.send(signal.SIGTERM)
        assert list(watch) == []
        process.send(signal.SIGTERM)
        assert finish() == []
        status, errors = process.end()
    assert status == 0, errors


@pytest.mark.parametrize(
    ("inherited", "number"),
    [
        pytest.param("--ignore-signal=INT", signal.SIGINT, id="a script in the background"),
        pytest.param("--block-signal=TERM", signal.SIGTERM, id="a thread that blocks SIGTERM"),
        pytest.param("--block-signal=INT", signal.SIGINT, id="a thread that blocks SIGINT"),
    ],
)
def test_a_signal_drains_it_whatever_started_it(
    tmp_path: Path, start: Start, inherited: str, number: signal.Signals
) -> None:
    process = start("--run-dir", tmp_path / "run", prefix=["env", inherited], in_terminal=True)
    target = process.wait_for("LISTENING")[1]
    with stream_under_way(target) as (finish, watch):
        process.send(number)
        assert list(watch) == []
        assert finish() == []
        status, errors = process.end()
    assert status == 0, errors


def test_under_nohup_it_outlives_its_terminal(tmp_path: Path, start: Start) -> None:
    Chief(tmp_path / "run").publish(1)
    process = start("--run-dir", tmp_path / "run", prefix=["nohup"], in_terminal=True)
    target = process.wait_for("READY")[1]
    process.signal_group(signal.SIGHUP)
    Chief(tmp_path / "run").publish(2)
    with Client(target) as client:
        until(lambda: client.metadata().step == 2)
    process.send(signal.SIGTERM)
    status, errors = process.end()
    assert status == 0, errors


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("flag", ["--grpc-port", "--http-port"])
def test_a_port_in_use_ends_it_with_one_line_that_names_the_flag(tmp_path: Path, flag: str, front_end: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = "--http-port" if flag == "--grpc-port" else "--grpc-port"
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "understudy.cli", "serve", "--run-dir", tmp_path),
                *("--frontend", front_end, flag, port, other, "0"),
            ],
            env={**os.environ, **preloaded()},
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
    assert ended.returncode == 1
    assert flag in ended.stderr
    assert port in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--run-dir and --checkpoints"),
        (["--run-dir", "r", "--grpc-prot", "1"], "--grpc-port"),
        (["--run-dir", "r", "--drain-seconds", "-1"], "--drain-seconds"),
        (["--run-dir", "r", "--slots", "1"], "--slots"),
    ],
)
def test_a_wrong_flag_ends_it_with_a_sentence(arguments: list[str], words: str) -> None:
    ended = CliRunner().invoke(main, ["serve", *arguments])
    assert ended.exit_code == 2
    assert words in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--experiment", "no_such_module:thing"], "no_such_module"),
        (["--eval-data", "test=missing.npz"], "missing.npz"),
        (["--state-dir", "/proc/state"], "state_dir /proc/state cannot be written to"),
        pytest.param(
            ["--state-dir", "/proc/state", "--frontend", "envoy"],
            "state_dir /proc/state cannot be written to",
            marks=needs_envoy,
        ),
    ],
)
def test_what_keeps_it_from_starting_is_said_in_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "understudy.cli",
            "serve",
            "--run-dir",
            "run",
            "--grpc-port=0",
            "--http-port=0",
            *arguments,
        ],
        cwd=tmp_path,
        env={**os.environ, **preloaded(), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("Error: ")]
    assert words in line
    assert "Traceback" not in ended.stderr


def test_it_ends_by_itself_once_training_has_ended_and_all_is_evaluated(tmp_path: Path, start: Start) -> None:
    chief = Chief(tmp_path / "run")
    write_dataset(tmp_path / "test.npz", best_step=3)
    for step in (1, 2, 3):
        chief.publish(step)
    options = ("--run-dir", tmp_path / "run", "--eval-data", f"test={tmp_path / 'test.npz'}", "--exit-when-finished")
    with TrainingJournal(RunDir(tmp_path / "run")) as journal:
        journal.record_step(3)
        process = start(*options)
        process.wait_for("READY")
    status, errors = process.end()
    assert status == 0, errors
    records = ledger_of(RunDir(tmp_path / "run"))
    assert sorted((record.step, record.dataset) for record in records) == [(1, "test"), (2, "test"), (3, "test")]


def test_a_run_folder_that_is_deleted_and_trained_anew_is_served_with_a_ledger_of_its_own(
    tmp_path: Path, start: Start
) -> None:
    run = tmp_path / "run"
    write_dataset(tmp_path / "test.npz", best_step=3)
    for step in (1, 9):
        Chief(run).publish(step)
    process = start("--run-dir", run, "--eval-data", f"test={tmp_path / 'test.npz'}")
    before = process.wait_for("READY")
    assert before[3] == "9"
    with Client(before[1]) as client:
        assert len([entry.step for _, entry in zip(range(2), client.watch_evaluations(), strict=False)]) == 2
        until(lambda: len([*(run / "evaluator" / "results").glob("*.json")]) == 2)
    decision = run / "evaluator" / DECISION_FILE
    identity = json.loads(decision.read_bytes())["evaluator_id"]
    shutil.rmtree(run)
    for step in (2, 3):
        Chief(run).publish(step)
    ready = process.wait_for("READY")
    assert ready[3] == "3"
    with Client(ready[1]) as client:
        assert {entry.step for _, entry in zip(range(2), client.watch_evaluations(), strict=False)} == {2, 3}
        assert {entry.step for entry in client.list_evaluations()} == {2, 3}
    assert json.loads(decision.read_bytes())["replaces"] == [identity]
    process.send(signal.SIGTERM)
    status, errors = process.end()
    assert status == 0, errors


def ledger_of(run: RunDir) -> list[EvaluationRecord]:
    ledger = Ledger(run.evaluator / "ledger.sqlite")
    try:
        return ledger.page()
    finally:
        ledger.close()
