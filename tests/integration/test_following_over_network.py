"""Servers that follow an evaluator over the network, without a folder that both have."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import trustme
from click.testing import CliRunner
from integration.test_callers import entry

from testkit.certificates import Credentials, replace
from testkit.checkpoints import Chief, ones, step_model
from testkit.front_ends import FRONT_ENDS, GRPCIO
from testkit.html_pages import Page
from testkit.in_process import RunningService, running_service, until
from testkit.peer_server import Peer
from testkit.ports import free_ports
from understudy.checkpoints import RunDir, Signer, SigningKey
from understudy.checkpoints.keras_signature import signature_of
from understudy.checkpoints.layout import MODEL_FILE
from understudy.checkpoints.publish import CheckpointPublisher
from understudy.checkpoints.signing import public_file, write_key_pair
from understudy.cli.main import main
from understudy.clients import Client, PermissionDeniedError
from understudy.clients.types import FleetServer
from understudy.evaluator import evaluator_state
from understudy.evaluator.serving import following
from understudy.service.fleet import fleet_handler
from understudy.service.fleet.fleet_handler import MAX_READS
from understudy.v1 import fleet_pb2, fleet_pb2_grpc

pytestmark = pytest.mark.long

Start = Callable[..., RunningService]

SECONDS = 60


@pytest.fixture
def evaluator_stack() -> Iterator[ExitStack]:
    """Ends the evaluator, before the test does or with it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def evaluate(replicas: tuple[str, ...], tmp_path: Path, evaluator_stack: ExitStack) -> Start:
    """Return a function that starts the evaluator of the run; it scores nothing, to be quick."""

    def start(run: str = "run", front_end: str = GRPCIO, settings: Any = None, **evaluator: Any) -> RunningService:
        settings = {"run_dir": tmp_path / run, **(settings or {})}
        state_dir = tmp_path / run / "evaluator"
        return evaluator_stack.enter_context(
            running_service(settings, evaluator, replicas=replicas, state_dir=state_dir, front_end=front_end)
        )

    return start


@pytest.fixture
def follow(replicas: tuple[str, ...], tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a server that follows the evaluator at some addresses."""
    with ExitStack() as stack:

        def start(
            name: str, *addresses: str, settings: Any = None, front_end: str = GRPCIO, **evaluator: Any
        ) -> RunningService:
            followed = {"follow": ",".join(addresses)}
            settings = {**followed, "follow_name": name, **(settings or {})}
            evaluator = {**followed, "poll_interval_seconds": 3600.0, **evaluator}
            state_dir = tmp_path / "states" / name
            running = running_service(settings, evaluator, replicas=replicas, state_dir=state_dir, front_end=front_end)
            return stack.enter_context(running)

        yield start


def serves(client: Client, step: int) -> Callable[[], bool]:
    # All clients to one address here share how long gRPC waits before it connects to a server that was started again.
    return lambda: client.status(wait_for_ready=True).serving_step == step


def fleet(client: Client) -> dict[str, FleetServer]:
    return {server.name: server for server in client.fleet().servers}


def told(client: Client, name: str, text: str) -> Callable[[], bool]:
    return lambda: text in (fleet(client)[name].reason if name in fleet(client) else "")


def handled(server: RunningService, *codes: str) -> float:
    """Return how many reads of files have ended with one of these codes."""
    series = re.findall(
        r'^grpc_server_handled_total{grpc_code="(\w+)",grpc_method="ReadCheckpoint".*} (\S+)$',
        server.client().metrics(),
        re.MULTILINE,
    )
    return sum(float(value) for code, value in series if code in codes)


def publish_large(run: Path, step: int) -> None:
    """Publish a checkpoint of 2 MiB."""
    model = step_model(step)

    def write(folder: Path) -> None:
        model.save(folder / MODEL_FILE)
        (folder / "resume").mkdir()
        (folder / "resume" / "state").write_bytes(bytes(2**21))

    publisher = CheckpointPublisher(RunDir(run), keep=100)
    publisher.publish(step, write, epoch=None, final=False, metrics={}, signature=signature_of(model))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_promotions_pins_and_rollbacks_reach_every_server_on_both_front_ends(
    chief: Chief, evaluate: Start, follow: Start, front_end: str
) -> None:
    for step in (10, 20, 30):
        chief.publish(step)
    evaluator = evaluate(front_end=front_end, version_policy=10)
    assert evaluator.wait_ready() == 10
    servers = [follow("one", evaluator.grpc), follow("two", evaluator.grpc, front_end=front_end)]
    assert [server.wait_ready() for server in servers] == [10, 10]

    client = evaluator.client()
    clients = [server.client() for server in servers]
    for step in (30, 20, 30, 10):
        assert client.promote(step).serving_step == step
        for each in clients:
            until(serves(each, step))
            np.testing.assert_allclose(each.predict({"x": ones(1)}).outputs["y"], step)
    assert client.roll_back().serving_step == 30
    for each in clients:
        until(serves(each, 30))
    until(lambda: all(server.current for server in fleet(client).values()))
    found = client.fleet()
    assert found.decision is not None
    assert (found.decision.step, found.decision.sequence) == (30, 6)
    assert [(server.name, server.serving_step, server.reason) for server in found.servers] == [
        ("one", 30, ""),
        ("two", 30, ""),
    ]
    assert all(server.lag_seconds is not None for server in found.servers)
    assert evaluator.metric("understudy_fleet_servers", step="30") == 2
    assert evaluator.metric("understudy_fleet_servers_behind") == 0
    assert servers[0].metric("understudy_following") == 1
    with pytest.raises(PermissionDeniedError, match=r"at 127.0.0.1:\d+ serves, so Promote is refused"):
        clients[0].promote(10)

    shown = CliRunner().invoke(main, ["status", "--fleet", "--target", evaluator.grpc])
    assert shown.exit_code == 0
    assert "decided: step 30\nserver" in shown.output
    listed = CliRunner().invoke(main, ["status", "--fleet", "--json", "--target", evaluator.grpc])
    last_line = listed.output.strip().split("\n")[-1]
    assert [server["current"] for server in json.loads(last_line)["servers"]] == [True, True]


def test_servers_go_on_and_start_again_without_the_evaluator_and_find_the_next_one(
    chief: Chief, evaluate: Start, follow: Start, evaluator_stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "CONTACT_SECONDS", 0.2)
    chief.publish(10)
    chief.publish(20)
    evaluator = evaluate(version_policy=10)
    gone = evaluator.grpc
    with Peer() as second:  # an address that the next evaluator will have
        next_address = second.target
    first = follow("one", gone, next_address)
    assert first.wait_ready() == 10
    evaluator_stack.close()
    assert first.client().predict({"x": ones(1)}).step == 10
    until(lambda: first.metric("understudy_following") == 0)
    first.start_stopping()
    first.join()

    again = follow("one", gone, next_address)
    assert again.wait_ready() == 10

    port = int(next_address.rpartition(":")[2])
    evaluate(settings={"grpc_port": port}, version_policy=20).wait_ready()
    until(serves(again.client(), 20))


def test_a_server_may_follow_one_that_follows_or_the_evaluator_whichever_is_there(
    chief: Chief, evaluate: Start, follow: Start, evaluator_stack: ExitStack
) -> None:
    for step in (20, 30):
        chief.publish(step)
    evaluator = evaluate(version_policy=10)
    own_port = {"grpc_port": int(evaluator.grpc.rpartition(":")[2])}
    between = follow("between", evaluator.grpc)
    leaf = follow("leaf", between.grpc, evaluator.grpc)
    until(lambda: "leaf" in fleet(between.client()))
    chief.publish(10)  # the first decision of all
    assert (between.wait_ready(), leaf.wait_ready()) == (10, 10)
    client = leaf.client()

    ports = {"grpc_port": int(between.grpc.rpartition(":")[2])}
    between.start_stopping()
    between.join()
    evaluator.client().promote(20)
    until(serves(client, 20))
    assert "leaf" in fleet(evaluator.client())

    between = follow("between", evaluator.grpc, settings=ports)
    until(serves(between.client(), 20))
    evaluator_stack.close()
    until(lambda: "leaf" in fleet(between.client()))
    until(lambda: leaf.metric("understudy_following") == 1)
    assert client.status().serving_step == 20

    evaluator = evaluate(settings=own_port, version_policy=10)
    evaluator.wait_ready()
    evaluator.client().promote(30)
    until(serves(client, 30))
    until(lambda: fleet(between.client())["leaf"].current)  # once it has told what it serves


def test_a_server_does_not_stay_with_one_that_has_lost_the_evaluator_if_it_can_reach_it(
    chief: Chief, evaluate: Start, follow: Start, evaluator_stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_handler, "CONTACT_SECONDS", 0.2)
    for step in (10, 20):
        chief.publish(step)
    evaluator = evaluate(version_policy=10)
    between = follow("between", evaluator.grpc)
    (port,) = free_ports(1)
    leaf = follow("leaf", between.grpc, f"127.0.0.1:{port}")
    assert (between.wait_ready(), leaf.wait_ready()) == (10, 10)
    evaluator_stack.close()
    until(lambda: between.metric("understudy_following") == 0)
    until(lambda: "leaf" in fleet(between.client()) and fleet(between.client())["leaf"].current)

    evaluator = evaluate(settings={"grpc_port": port}, version_policy=10)  # where the other one does not look for it
    evaluator.wait_ready()
    evaluator.client().promote(20)
    until(serves(leaf.client(), 20))
    until(lambda: fleet(evaluator.client())["leaf"].current)
    assert between.client().status().serving_step == 10


def test_an_evaluator_whose_state_is_restored_from_a_backup_is_followed_through_a_server_between(
    chief: Chief, evaluate: Start, follow: Start, evaluator_stack: ExitStack, tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        chief.publish(step)
    evaluator = evaluate(version_policy=10)
    own_port = {"grpc_port": int(evaluator.grpc.rpartition(":")[2])}
    between = follow("between", evaluator.grpc)
    leaf = follow("leaf", between.grpc)
    assert (between.wait_ready(), leaf.wait_ready()) == (10, 10)
    state, backup = tmp_path / "run" / "evaluator", tmp_path / "backup"
    shutil.copytree(state, backup)
    for step in (20, 30):
        evaluator.client().promote(step)
        until(serves(leaf.client(), step))
    evaluator_stack.close()
    shutil.rmtree(state)
    backup.rename(state)
    evaluator = evaluate(settings=own_port, version_policy=10)  # it has forgotten decisions 2 and 3
    for step in (10, 20):
        if step != 10:
            evaluator.client().promote(step)
        for each in (between, leaf):
            until(serves(each.client(), step))
        until(lambda: fleet(between.client())["leaf"].current)


def test_a_checkpoint_that_the_trainer_has_deleted_comes_from_the_evaluator(
    chief: Chief, evaluate: Start, follow: Start, tmp_path: Path
) -> None:
    chief.publish(10)
    evaluator = evaluate(version_policy=10)
    evaluator.wait_ready()
    chief.publish(20)
    shutil.rmtree(RunDir(tmp_path / "run").checkpoint(10))

    server = follow("one", evaluator.grpc, settings={"run_dir": tmp_path / "run"})
    assert server.wait_ready() == 10
    evaluator.client().promote(20)
    until(serves(server.client(), 20))
    downloads = tmp_path / "states" / "one" / following.DOWNLOADS_DIR / "checkpoints"
    assert [folder.name for folder in downloads.iterdir()] == ["000000000010"]  # the other one is shared


def test_a_server_with_tls_a_token_and_a_certificate_follows_and_one_without_the_group_does_not(
    chief: Chief, evaluate: Start, follow: Start, tmp_path: Path
) -> None:
    authority = trustme.CA()
    server_files = Credentials(tmp_path / "server", authority, "127.0.0.1")
    own = Credentials(tmp_path / "own", authority, "fleet.example.com")
    callers = tmp_path / "callers.toml"
    callers.write_text(entry("fleet", ("follow",), ("t1",)) + entry("viewer", ("observe",), ("t2",)))
    tokens = [tmp_path / name for name in ("fleet.token", "viewer.token")]
    tokens[0].write_text("t1")
    tokens[1].write_text("t2")
    chief.publish(10)
    settings = {
        "tls_cert": server_files.certificate,
        "tls_key": server_files.key,
        "tls_client_ca": server_files.ca,
        "callers": callers,
    }
    evaluator = evaluate(settings=settings)
    evaluator.wait_ready()
    tls = {"follow_tls_ca": server_files.ca, "follow_tls_cert": own.certificate, "follow_tls_key": own.key}
    servers = [
        follow(f"server-{token.stem}", evaluator.grpc, settings={**tls, "follow_token_file": token}) for token in tokens
    ]
    assert servers[0].wait_ready() == 10
    viewer = evaluator.client(credentials=own.channel(), token_file=tokens[1])
    until(lambda: [name for name, server in fleet(viewer).items() if server.current] == ["server-fleet"])
    until(lambda: "not in the group follow" in httpx.get(f"http://{servers[1].http}/readyz").text)
    assert servers[1].answers("/readyz") == 503


def test_only_signed_checkpoints_are_taken_from_an_evaluator(evaluate: Start, follow: Start, tmp_path: Path) -> None:
    write_key_pair(tmp_path / "trainer.key")
    write_key_pair(tmp_path / "other.key")
    chief = Chief(tmp_path / "run", signer=Signer(key=SigningKey.read(tmp_path / "trainer.key"), run="run"))
    chief.publish(10)
    evaluator = evaluate(require_signature=(public_file(tmp_path / "trainer.key"),))
    evaluator.wait_ready()
    required = {"run_name": "run", "require_signature": (public_file(tmp_path / "trainer.key"),)}
    assert follow("one", evaluator.grpc, **required).wait_ready() == 10
    accepted = tmp_path / "accepted.pem"
    replace(accepted, public_file(tmp_path / "other.key").read_bytes())
    other = follow("two", evaluator.grpc, **{**required, "require_signature": (accepted,)})
    until(told(evaluator.client(), "two", "is signed with the key"))
    page = " ".join(Page(httpx.get(f"http://{evaluator.http}/").text).text.split())
    assert "1 of 2 connected servers serve step 10" in page
    assert re.search(r"two\S*127\.0\.0\.1:\d+ ?behind ?nothing.*is signed with the key", page)
    assert other.answers("/readyz") == 503
    replace(accepted, public_file(tmp_path / "trainer.key").read_bytes())
    assert other.wait_ready() == 10


def test_an_evaluator_of_another_model_or_run_is_not_followed(
    evaluate: Start, follow: Start, tmp_path: Path, evaluator_stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    Chief(tmp_path / "run").publish(10)
    evaluator = evaluate(settings={"model_name": "digits"})
    evaluator.wait_ready()
    wrong = follow("wrong", evaluator.grpc, settings={"model_name": "letters"})
    server = follow("one", evaluator.grpc, settings={"model_name": "digits"})
    assert server.wait_ready() == 10
    until(lambda: "there is no model 'letters'" in httpx.get(f"http://{wrong.http}/readyz").text)
    assert wrong.answers("/readyz") == 503
    assert "wrong" not in fleet(evaluator.client())

    port = int(evaluator.grpc.rpartition(":")[2])
    evaluator_stack.close()
    Chief(tmp_path / "another").publish_other(10, step_model(99))
    other = evaluate("another", settings={"grpc_port": port, "model_name": "digits"})
    other.wait_ready()
    until(lambda: "it is another evaluator" in capsys.readouterr().out)
    until(told(other.client(), "one", "it follows another evaluator"))
    replaced = re.search(r"--replaces-evaluator (\w+)", fleet(other.client())["one"].reason)
    assert replaced
    assert server.metric("understudy_following") == 0
    np.testing.assert_allclose(server.client().predict({"x": ones(1)}).outputs["y"], 10)

    evaluator_stack.close()
    evaluate(
        "another", settings={"grpc_port": port, "model_name": "digits"}, replaces_evaluator=replaced[1]
    ).wait_ready()
    until(lambda: server.metric("understudy_following") == 1)
    until(lambda: server.client().predict({"x": ones(1)}).outputs["y"].item(0) == 99)


def test_servers_go_over_to_the_evaluator_of_the_run_that_is_trained_anew_where_theirs_was(
    chief: Chief, evaluate: Start, follow: Start, evaluator_stack: ExitStack, tmp_path: Path
) -> None:
    chief.publish(10)
    evaluator = evaluate()
    port = int(evaluator.grpc.rpartition(":")[2])
    between = follow("between", evaluator.grpc)
    leaf = follow("leaf", between.grpc)
    assert (between.wait_ready(), leaf.wait_ready()) == (10, 10)
    shutil.rmtree(tmp_path / "run")
    for step, value in ((5, 55), (10, 99)):
        Chief(tmp_path / "run").publish_other(step, step_model(value))
    evaluator.join()  # `understudy serve` then starts again
    evaluator_stack.close()
    evaluator = evaluate(settings={"grpc_port": port}, version_policy=5)
    for each in (between, leaf):
        until(serves(each.client(), 5))
        until(lambda each=each: each.client().status().latest_step == 5)  # type: ignore[misc]
    evaluator.client().promote(10)
    for each in (between, leaf):
        until(serves(each.client(), 10))
        np.testing.assert_allclose(each.client().predict({"x": ones(1)}).outputs["y"], 99)


def status_of(server: RunningService) -> str:
    return httpx.get(f"http://{server.http}/readyz").text


def has_begun_to_stop(server: RunningService) -> bool:
    try:
        return "draining" in status_of(server)
    except httpx.TransportError:  # it has gone on to its HTTP port
        return True


def test_a_server_that_is_newer_than_the_evaluator_says_so(follow: Start) -> None:
    with Peer() as older:  # it has no FleetService
        server = follow("one", older.target)
        until(lambda: "the evaluator is of an older version" in status_of(server))
        assert server.answers("/readyz") == 503


def test_a_clock_that_is_off_by_an_hour_changes_nothing(
    chief: Chief, evaluate: Start, follow: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    chief.publish(10)
    evaluator = evaluate(version_policy=10)
    evaluator.wait_ready()
    real = time.time

    def off() -> float:
        """The time of this project's code; gRPC mixes it with that of its own core."""
        return real() + (offset if sys._getframe(1).f_globals["__name__"].startswith("understudy.") else 0.0)

    with monkeypatch.context() as patched:
        patched.setattr(time, "time", off)
        for offset in (-3600.0, 3600.0):
            chief.publish(20 if offset < 0 else 30)
            server = follow(f"server{offset:+.0f}", evaluator.grpc)
            assert server.wait_ready() == 10
    client = evaluator.client()
    for step in (20, 30):
        until(lambda step=step: step in {each.step for each in client.checkpoints()})  # type: ignore[misc]
        client.promote(step)
        until(lambda step=step: [each.serving_step for each in client.fleet().servers] == [step, step])  # type: ignore[misc]
    assert all(0 <= each.lag_seconds < 60 for each in client.fleet().servers if each.lag_seconds is not None)


def test_half_the_fleet_without_the_checkpoint_is_told_and_serves_the_one_before(
    chief: Chief, evaluate: Start, follow: Start, tmp_path: Path
) -> None:
    chief.publish(10)
    evaluator = evaluate(version_policy=10)
    evaluator.wait_ready()
    servers = [follow("large", evaluator.grpc), follow("small", evaluator.grpc, follow_download_mib=1)]
    assert [server.wait_ready() for server in servers] == [10, 10]
    publish_large(tmp_path / "run", 20)
    client = evaluator.client()
    until(lambda: 20 in {each.step for each in client.checkpoints()})
    client.promote(20)
    until(serves(servers[0].client(), 20))
    until(told(client, "small", "follow_download_mib is 1"))
    until(lambda: fleet(client)["large"].current)
    found = fleet(client)["small"]
    assert (found.current, found.serving_step) == (False, 10)
    assert evaluator.metric("understudy_fleet_servers_behind") == 1
    assert servers[1].client().predict({"x": ones(1)}).step == 10
    shown = CliRunner().invoke(main, ["status", "--fleet", "--target", evaluator.grpc])
    assert shown.exit_code == 1
    assert "behind" in shown.output


TAKES_LITTLE = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
"""Options of a channel that takes only a small part of an answer that its caller does not read."""


def serving_a_large_file(evaluate: Start, run: Path) -> tuple[RunningService, fleet_pb2.ReadCheckpointRequest]:
    """Return an evaluator of a checkpoint with a file of 2 MiB, and the request for it."""
    publish_large(run, 10)
    evaluator = evaluate()
    evaluator.wait_ready()
    (checkpoint,) = evaluator.client().checkpoints()
    return evaluator, fleet_pb2.ReadCheckpointRequest(step=10, digest=checkpoint.digest, path="resume/state")


def test_callers_that_take_nothing_of_a_file_keep_no_other_from_it(
    evaluate: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.service.services.PATIENCE_SECONDS", 0.2)
    evaluator, asked = serving_a_large_file(evaluate, tmp_path / "run")
    with grpc.insecure_channel(evaluator.grpc, options=TAKES_LITTLE) as channel:
        read = fleet_pb2_grpc.FleetServiceStub(channel).ReadCheckpoint
        unread = [read(asked, timeout=SECONDS) for _ in range(MAX_READS)]
        for each in unread:
            each.initial_metadata()
        assert sum(len(part.content) for part in read(asked, timeout=SECONDS)) == 2**21
        lost = [read(asked, timeout=SECONDS) for _ in range(MAX_READS)]
        for each in lost:
            each.initial_metadata()
    until(lambda: handled(evaluator, "OK", "Aborted", "Canceled", "Internal") == 2 * MAX_READS + 1)
    assert handled(evaluator, "Internal") == 0


def test_many_reads_of_one_connection_that_take_nothing_keep_another_for_the_time_of_one_from_its_file(
    evaluate: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.service.services.PATIENCE_SECONDS", 2.0)
    evaluator, asked = serving_a_large_file(evaluate, tmp_path / "run")
    own = (("grpc.use_local_subchannel_pool", 1),)
    with (
        grpc.insecure_channel(evaluator.grpc, options=TAKES_LITTLE + own) as stuck,
        grpc.insecure_channel(evaluator.grpc, options=own) as other,
    ):
        read = fleet_pb2_grpc.FleetServiceStub(stuck).ReadCheckpoint
        unread = [read(asked, timeout=SECONDS) for _ in range(4 * MAX_READS)]
        until(lambda: evaluator.metric("grpc_server_started_total", grpc_method="ReadCheckpoint") == len(unread))
        parts = fleet_pb2_grpc.FleetServiceStub(other).ReadCheckpoint(asked, timeout=SECONDS)
        assert sum(len(part.content) for part in parts) == 2**21
        assert handled(evaluator, "Aborted") <= MAX_READS


def test_a_read_that_is_under_way_ends_when_the_evaluator_drains(evaluate: Start, tmp_path: Path) -> None:
    evaluator, asked = serving_a_large_file(evaluate, tmp_path / "run")
    with grpc.insecure_channel(evaluator.grpc, options=TAKES_LITTLE) as channel:
        read: Any = fleet_pb2_grpc.FleetServiceStub(channel).ReadCheckpoint(asked, timeout=SECONDS)
        next(read)
        evaluator.start_stopping()
        until(lambda: has_begun_to_stop(evaluator))
        with pytest.raises(grpc.RpcError, match="takes no new work; read the rest of resume/state later") as raised:
            list(read)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


class _Stalled(io.BufferedReader):
    """A file on storage that does not answer."""

    began = threading.Event()

    def seek(self, *_: object) -> int:
        return 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.began.set()
        return super().read(size)


def test_a_caller_that_goes_away_while_the_storage_does_not_answer_holds_no_other_call_up(
    chief: Chief, evaluate: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    chief.publish(10)
    evaluator = evaluate()
    evaluator.wait_ready()
    client = evaluator.client()
    (checkpoint,) = client.checkpoints()
    reader, writer = os.pipe()
    monkeypatch.setattr(evaluator_state, "open_leased", lambda *_, **__: _Stalled(io.FileIO(reader)))
    asked = fleet_pb2.ReadCheckpointRequest(step=10, digest=checkpoint.digest, path="manifest.json")
    with os.fdopen(writer, "wb"):
        with grpc.insecure_channel(evaluator.grpc) as channel:
            unread: Any = fleet_pb2_grpc.FleetServiceStub(channel).ReadCheckpoint(asked, timeout=SECONDS)
            assert _Stalled.began.wait(SECONDS)
        assert unread.code() is grpc.StatusCode.CANCELLED
        until(lambda: handled(evaluator, "Canceled") == 1)
        assert client.status(timeout_seconds=5).serving_step == 10
