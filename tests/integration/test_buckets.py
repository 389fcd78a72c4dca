"""A trainer here, an evaluator elsewhere, and nothing between them but a bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from integration.conftest import Run

from soak.programs import Program
from testkit.buckets import BucketServer, StoreServer, bucket_server, gcs_server
from testkit.checkpoints import Chief, ones, step_model, write_dataset
from testkit.in_process import WAIT_SECONDS, running_service, until
from testkit.preloading import preloaded
from understudy.checkpoints import RunDir, TrainingJournal
from understudy.checkpoints.layout import MANIFEST_FILE, step_name
from understudy.cli.main import main
from understudy.clients import Client
from understudy.evaluator.evaluator_errors import ConfigurationError

pytestmark = pytest.mark.long

END_SECONDS = 60


@pytest.fixture(scope="module")
def s3() -> Iterator[BucketServer]:
    with bucket_server() as server:
        yield server


@contextmanager
def publishing(run: Path, url: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "understudy.cli", "publish", f"--run-dir={run}", f"--to={url}"]
    process = subprocess.Popen([*command, "--keep-checkpoints=3"], env={**os.environ, **preloaded()})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving(folder: Path, url: str, *options: str) -> Iterator[Program]:
    folder.mkdir(exist_ok=True)
    program = Program(folder, f"--run-dir={url}", f"--state-dir={folder / 'state'}", *options)
    try:
        yield program
    finally:
        program.kill()


@pytest.mark.parametrize("running", [bucket_server, gcs_server])
def test_a_whole_day_with_a_bucket_between_trainer_and_evaluator(
    running: Callable[[], AbstractContextManager[StoreServer]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    servers = ExitStack()
    request.addfinalizer(servers.close)
    store = servers.enter_context(running())
    for name, value in preloaded().items():
        monkeypatch.setenv(name, value)
    url, run, elsewhere = f"{store.make_bucket()}/runs/one", tmp_path / "run", tmp_path / "elsewhere"
    write_dataset(tmp_path / "test.npz", best_step=20)
    data = f"--eval-data=test={tmp_path / 'test.npz'}"
    with ExitStack() as training:
        with (
            publishing(run, url) as publisher,
            serving(elsewhere, url, data) as server,
            Client(server.grpc) as client,
        ):
            assert not run.exists()
            chief = Chief(run, keep=3)
            journal = training.enter_context(TrainingJournal(RunDir(run)))
            chief.publish(10)
            server.wait_for("READY")
            assert client.predict({"x": ones(2)}).step == 10
            chief.publish(20)
            until(lambda: client.predict({"x": ones(1)}).step == 20)
            store.stop()
            chief.publish(30)
            assert client.predict({"x": ones(1)}).step == 20
            publisher.kill()
            store.start()
        with publishing(run, url) as publisher:
            options = ["--exit-when-finished", data]
            with serving(elsewhere, url, *options) as server, Client(server.grpc) as client:
                server.wait_for("READY")
                until(lambda: client.predict({"x": ones(1)}).step == 30)
                chief.publish(40)
                journal.record_step(40)
                until(lambda: client.predict({"x": ones(1)}).step == 40)
                scored = client.watch_evaluations()
                entries = [next(scored) for _ in range(4)]
                training.close()
                assert publisher.wait(END_SECONDS) == 0
                assert server.wait() == 0
    assert [(entry.step, entry.outcome) for entry in entries] == [(step, "scored") for step in (10, 20, 30, 40)]
    assert {name.split("/")[1] for name in store.names(url) if "/" in name} == {f"{step:012d}" for step in (20, 30, 40)}
    assert not (run / "evaluator").exists()


def test_a_publisher_that_starts_while_the_store_does_not_answer_waits_for_it(
    s3: BucketServer, tmp_path: Path, chief: Chief
) -> None:
    url = f"{s3.make_bucket()}/run"
    chief.publish(10)
    requests = threading.Semaphore(0)

    def fail(_: Mapping[str, Any]) -> str:
        requests.release()
        return "500 Internal Server Error"

    s3.refuse = fail
    with publishing(tmp_path / "run", url) as publisher:
        for _ in range(5):
            assert requests.acquire(timeout=WAIT_SECONDS), publisher.poll()
        s3.refuse = lambda _: None
        until(lambda: f"checkpoints/{step_name(10)}/{MANIFEST_FILE}" in s3.names(url))
        publisher.terminate()
        assert publisher.wait(END_SECONDS) == 0


def test_a_checkpoint_that_cannot_be_copied_now_is_only_late(
    s3: BucketServer, run_service: Run, tmp_path: Path, chief: Chief
) -> None:
    url = f"{s3.make_bucket()}/run"
    write_dataset(tmp_path / "test.npz", best_step=20)
    chief.publish(10)
    s3.upload(tmp_path / "run", url)
    service = run_service(
        {"run_dir": Path(url), "eval_data": {"test": tmp_path / "test.npz"}}, {"load_retry_seconds": 0.05}
    )
    assert service.wait_ready() == 10
    client = service.client()
    models = threading.Semaphore(0)

    def refuse_models(environ: Mapping[str, Any]) -> str | None:
        if environ["REQUEST_METHOD"] != "GET" or not environ["PATH_INFO"].endswith("model.keras"):
            return None
        models.release()
        return "503 Slow Down"

    s3.refuse = refuse_models
    try:
        chief.publish(20)
        s3.upload(tmp_path / "run", url)
        for _ in range(8):  # more often than a damaged checkpoint is tried
            assert models.acquire(timeout=WAIT_SECONDS)
        assert client.predict({"x": ones(1)}).step == 10
    finally:
        s3.refuse = lambda _: None
    until(lambda: client.predict({"x": ones(1)}).step == 20)
    entries = client.watch_evaluations()
    assert [(entry.step, entry.outcome) for entry in (next(entries), next(entries))] == [
        (10, "scored"),
        (20, "scored"),
    ]


def test_a_pin_is_carried_out_while_the_bucket_does_not_answer(
    s3: BucketServer, run_service: Run, tmp_path: Path, chief: Chief
) -> None:
    url = f"{s3.make_bucket()}/run"
    chief.publish(10)
    s3.upload(tmp_path / "run", url)
    service = run_service({"run_dir": Path(url)})
    service.wait_ready()
    client = service.client()
    chief.publish(20)
    s3.upload(tmp_path / "run", url)
    until(lambda: client.predict({"x": ones(1)}).step == 20)
    s3.stop()
    try:
        client.promote(10)
        assert client.predict({"x": ones(1)}).step == 10
        client.unpin()
        until(lambda: client.predict({"x": ones(1)}).step == 20)
    finally:
        s3.start()


def test_while_a_bucket_refuses_is_gone_or_is_emptied_the_evaluator_and_who_follows_it_serve_on(
    s3: BucketServer, run_service: Run, replicas: tuple[str, ...], tmp_path: Path, chief: Chief
) -> None:
    url = f"{s3.make_bucket()}/run"
    for step in (10, 20):
        chief.publish(step)
    s3.upload(tmp_path / "run", url)
    evaluator = run_service({"run_dir": Path(url)}, {"version_policy": 20})
    assert evaluator.wait_ready() == 20
    follow = {"follow": evaluator.grpc}
    settings = {**follow, "follow_name": "one"}
    with running_service(settings, follow, replicas=replicas, state_dir=tmp_path / "one") as server:
        assert server.wait_ready() == 20
        clients = [evaluator.client(), server.client()]

        def all_serve(step: int) -> bool:
            return [client.predict({"x": ones(1)}).step for client in clients] == [step, step]

        s3.refuse = lambda _: "403 FORBIDDEN"
        until(lambda: evaluator.metric("understudy_source_failures") > 0)
        assert all_serve(20)
        s3.refuse = lambda _: None
        until(lambda: evaluator.metric("understudy_source_failures") == 0)

        for name in s3.names(url):
            s3.remove(f"{url}/{name}")
        until(lambda: {entry.step for entry in clients[0].checkpoints()} == {20})
        assert all_serve(20)
        assert evaluator.metric("understudy_source_failures") == 0

        s3.upload(tmp_path / "run", url)
        until(lambda: {entry.step for entry in clients[0].checkpoints()} == {10, 20})
        clients[0].promote(10)
        until(lambda: all_serve(10))


def test_foreign_checkpoints_in_a_bucket_are_served(s3: BucketServer, run_service: Run, tmp_path: Path) -> None:
    bucket = s3.make_bucket()
    step_model(7).save(tmp_path / "model-7.keras")
    s3.upload(tmp_path / "model-7.keras", f"{bucket}/theirs/model-7.keras")
    service = run_service({"checkpoints": Path(f"{bucket}/theirs")})
    assert service.wait_ready() == 7


def test_a_bucket_that_does_not_exist_ends_the_service_by_name(s3: BucketServer, run_service: Run) -> None:
    del s3
    for settings in ({"checkpoints": Path("s3://no-such-bucket")}, {"run_dir": Path("s3://no-such-bucket/run")}):
        with pytest.raises(ConfigurationError, match=r"folder s3://no-such-bucket.* cannot be read: .*NoSuchBucket"):
            run_service(settings)


def test_a_store_that_does_not_answer_at_the_start_is_waited_for(
    s3: BucketServer, run_service: Run, tmp_path: Path, chief: Chief
) -> None:
    url = f"{s3.make_bucket()}/run"
    chief.publish(10)
    s3.upload(tmp_path / "run", url)
    s3.stop()
    try:
        service = run_service({"run_dir": Path(url)})
        until(lambda: url in httpx.get(f"http://{service.http}/readyz").json()["reason"])
    finally:
        s3.start()
    assert service.wait_ready() == 10


def test_publishing_where_it_cannot_be_is_one_sentence(s3: BucketServer, tmp_path: Path, chief: Chief) -> None:
    del s3
    chief.publish(10)
    for url, exit_code, text in (
        ("abfs://bucket/run", 2, "give s3://BUCKET/PATH or gs://BUCKET/PATH, not abfs://bucket/run"),
        ("s3://no-such-bucket/run", 1, "NoSuchBucket"),
    ):
        result = CliRunner().invoke(main, ["publish", "--run-dir", str(tmp_path / "run"), "--to", url])
        assert result.exit_code == exit_code
        assert text in result.stderr
        assert "Traceback" not in result.stderr


def test_commands_without_a_server_take_checkpoints_from_a_bucket(
    s3: BucketServer, tmp_path: Path, chief: Chief, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(status: int, *arguments: object) -> str:
        result = CliRunner().invoke(main, [*map(str, arguments)])
        assert result.exit_code == status, result.output
        return result.output

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    url, run, data = f"{s3.make_bucket()}/run", tmp_path / "run", tmp_path / "test.npz"
    write_dataset(data, best_step=20)
    chief.publish(10)
    chief.publish(20)
    s3.upload(run, url)

    for step, chosen in ((10, "10"), (20, "latest")):
        exported = tmp_path / f"{step}.keras"
        assert f"step {step} exported" in said(0, "export", "--run-dir", url, "--step", chosen, "--output", exported)
        assert exported.read_bytes() == (RunDir(run).checkpoint(step) / "model.keras").read_bytes()
    here, there = (
        json.loads(said(0, "evaluate", data, "--run-dir", folder, "--version", "10", "--json")) for folder in (run, url)
    )
    assert (there["step"], there["metrics"]) == (here["step"], here["metrics"])

    assert "there are [10, 20]" in said(1, "export", "--run-dir", url, "--step", "30", "--output", tmp_path / "a.keras")
    assert "Give latest or a step, or the state folder" in said(1, "evaluate", data, "--run-dir", url)
    assert "there is no checkpoint yet, neither at" in said(
        1, "evaluate", data, "--run-dir", f"{url}s", "--version=latest"
    )
    monkeypatch.setattr(s3, "refuse", lambda _: "403 Forbidden")
    assert f"{url} cannot be read: " in said(1, "evaluate", data, "--run-dir", url, "--version", "10")


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "--run-dir=RUN", "--output=URL"],
        ["export", "--run-dir=RUN", "--output=a.keras", "--state-dir=URL"],
        ["predict", "FILE", "--run-dir=RUN", "--output=URL"],
        ["evaluate", "FILE", "--run-dir=RUN", "--progress-file=URL"],
        ["publish", "--run-dir=URL", "--to=URL"],
        ["sign", "URL", "--sign-key=FILE"],
        ["train", "digits", "--run-dir=URL", "--steps=10"],
        ["run", "digits", "--run-dir=URL", "--steps=10"],
        ["serve", "--run-dir=RUN", "--state-dir=URL"],
        ["serve", "--run-dir=URL", "--eval-data=test=URL"],
        ["replay", "URL"],
        ["events", "list", "--state-dir=URL"],
    ],
    ids=lambda arguments: "-".join(arguments[:2]),
)
def test_a_url_where_a_path_is_meant_is_refused_and_nothing_is_written(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    given = {"RUN": "run", "FILE": "file", "URL": "s3://bucket/folder"}
    for name, value in given.items():
        arguments = [argument.replace(name, value) for argument in arguments]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "'s3://bucket/folder' is a URL; give a path on this machine" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_publishing_to_another_store_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["publish", f"--run-dir={tmp_path}", "--to=abfs://bucket/run"])
    assert result.exit_code == 2
    words = " ".join(result.output.split())
    assert "not abfs://bucket/run. To other stores, copy the run folder with the store's own tools" in words
