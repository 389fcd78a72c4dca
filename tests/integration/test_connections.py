"""Connections that say nothing, end nothing, are too many, or grow old, against whole servers with few files."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import numpy as np
import psutil
import pytest
from integration.conftest import Run

from testkit.checkpoints import Chief, ones, write_dataset
from testkit.front_ends import FRONT_ENDS, GRPCIO
from testkit.hostile_connections import UnfinishedBodies, call_compressed, push_unread, reset_rapidly
from testkit.in_process import WAIT_SECONDS, until
from testkit.served import Served, plain_model, publish, serving
from testkit.values import WIDTH
from understudy.clients import AsyncClient, CancelledError, Client, UnderstudyError
from understudy.service.front_end import HANDSHAKE_SECONDS, MAX_STREAMS
from understudy.v1 import prediction_pb2
from understudy.wire import encode_all

pytestmark = pytest.mark.long

MIB = 1 << 20
BODY_MIB = 32
BODY_BYTES = 4 * MIB
MESSAGE_BYTES = 16 * MIB
COMPRESSED_CALLS = 24
CONNECTIONS, STREAMS = 4, 20
SLACK_MIB = 120
"""Envoy's and Python's own buffers; without a bound, the bodies alone take 320 MiB."""

OPEN_FILES = 512
SILENT = 700
SECONDS = 30.0
LONGEST_WAIT_SECONDS = 20.0
"""Of a caller beside a hostile one, on busy machines."""


IDLE_SECONDS = HANDSHAKE_SECONDS + 2
"""Longer than a silent connection may last, so that this is not what ends one."""

PREDICT = "/understudy.v1.PredictionService/Predict"
PREDICT_STREAM = "/understudy.v1.PredictionService/PredictStream"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/understudy.v1.EvaluationService/WatchEvaluations"
REQUEST = prediction_pb2.PredictRequest(inputs=encode_all({"x": np.ones((1, WIDTH), np.float32)})).SerializeToString()


@pytest.fixture(scope="module", params=FRONT_ENDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with few open files, little memory for bodies and little patience for idle connections."""
    folder = tmp_path_factory.mktemp(str(request.param))
    publish(folder, {2: plain_model(2)})
    flags = (
        *("--max-message-mib", str(MESSAGE_BYTES // MIB), "--max-body-mib", str(BODY_MIB), "--frontend", request.param),
        *("--max-connection-idle-seconds", str(IDLE_SECONDS)),
    )
    with serving(folder, "plain", *flags, open_files=OPEN_FILES) as served:
        yield served


class IdleChannel(NamedTuple):
    """A channel that has made one call, and the states of its connection since."""

    channel: Any
    states: list[grpc.ChannelConnectivity]


@pytest.fixture(scope="module")
def idle(served: Served) -> Iterator[IdleChannel]:
    with served.channel() as channel:
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        channel.unary_unary(PREDICT)(REQUEST, timeout=SECONDS)
        until(lambda: states[-1:] == [grpc.ChannelConnectivity.READY])
        yield IdleChannel(channel, states)


@contextlib.contextmanager
def silent_connections(address: str, count: int) -> Iterator[list[socket.socket]]:
    host, port = address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((host, int(port)), SECONDS)) for _ in range(count)]


def closed(connections: list[socket.socket]) -> int:
    """Return how many connections the server has closed."""

    def is_closed(connection: socket.socket) -> bool:
        connection.setblocking(False)
        try:
            while data := connection.recv(65536):  # the settings with which an HTTP/2 server begins
                del data
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    return sum(map(is_closed, connections))


@pytest.mark.usefixtures("idle")
def test_silent_connections_beyond_the_limit_of_open_files_end_and_callers_are_answered(served: Served) -> None:
    with silent_connections(served.grpc, SILENT) as rpc, silent_connections(served.http, SILENT) as http:
        with Client(served.grpc, timeout_seconds=60) as client:
            assert client.predict({"x": np.ones((1, WIDTH), np.float32)}, wait_for_ready=True).step == 2

        def http_answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://{served.http}/readyz", timeout=SECONDS).status_code == 200
            return False

        until(http_answers)
        until(lambda: closed(rpc) == SILENT and closed(http) == SILENT)


def test_a_service_without_a_free_descriptor_answers_and_takes_up_the_checkpoint_later(tmp_path: Path) -> None:
    run, data = tmp_path / "run", tmp_path / "data.npz"
    write_dataset(data, best_step=10)
    chief = Chief(run)
    chief.publish(10)
    flags = ["--eval-data", f"test={data}", "--poll-interval-seconds", "0.05"]
    # While it makes constants, TensorFlow 2.21 ends the process if it cannot open a file: it raises without the GIL.
    flags += ["--frozen-memory-mib", "0"]
    with (
        serving(run, "m", *flags) as served,
        Client(served.grpc, timeout_seconds=SECONDS) as client,
        served.http_client(SECONDS) as http,
    ):
        evaluations = client.watch_evaluations(after=0)
        assert next(evaluations).step == 10
        http.get("/metrics").raise_for_status()  # its connection needs no descriptor later
        process = psutil.Process(served.pid)
        soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() - 12, hard))  # also where numbers in between are free
        chief.publish(20)
        until(lambda: "understudy_device_memory_bytes{" not in http.get("/metrics").raise_for_status().text)
        assert client.predict({"x": ones(3)}).step == 10
        process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
        recorded = next(evaluations)
        assert (recorded.step, recorded.outcome, recorded.reason) == (20, "scored", "")
        assert client.predict({"x": ones(3)}).step == 20


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_connections_age_out_under_load_without_a_failed_call(run_service: Run, chief: Chief) -> None:
    chief.publish(10)
    service = run_service({"max_connection_age_seconds": 1.0, "max_connection_age_grace_seconds": 20.0})
    service.wait_ready()
    client = service.client()
    over = threading.Event()
    answered: list[int] = []
    failures: list[Exception] = []

    def call() -> None:
        while not over.is_set():
            try:
                answered.append(client.predict({"x": ones(1)}).step)
            except UnderstudyError as error:
                failures.append(error)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    try:
        port = int(service.grpc.rsplit(":", 1)[1])
        seen: set[Any] = set()

        def has_reconnected_twice() -> bool:
            for connection in psutil.Process().net_connections("tcp"):
                if getattr(connection.raddr, "port", None) == port and connection.status == psutil.CONN_ESTABLISHED:
                    seen.add(connection.laddr.port)
            return len(seen) >= 3

        until(has_reconnected_twice)
    finally:
        over.set()
        for caller in callers:
            caller.join(WAIT_SECONDS)
    assert failures == []
    assert set(answered) == {10}


@pytest.mark.parametrize("front_end", [GRPCIO])  # Envoy lets watches run
async def test_a_watch_that_is_cut_off_by_its_connection_s_age_resumes_and_misses_nothing(
    run_service: Run, chief: Chief, dataset_file: Path
) -> None:
    age = {"max_connection_age_seconds": 0.5, "max_connection_age_grace_seconds": 0.1}
    service = run_service({**age, "eval_data": {"test": dataset_file}})
    sees: queue.Queue[int] = queue.Queue()

    def watches() -> float:
        return service.metric("grpc_server_started_total", grpc_method="WatchEvaluations")

    def watch_synchronously(client: Client) -> None:
        with contextlib.suppress(CancelledError):  # closed at the end
            for evaluation in client.watch_evaluations():
                sees.put(evaluation.step)

    async def watch(client: AsyncClient) -> None:
        async for evaluation in client.watch_evaluations():
            sees.put(evaluation.step)

    async with AsyncClient(service.grpc) as asynchronous:
        watching = asyncio.create_task(watch(asynchronous))
        with Client(service.grpc) as client:
            watching_too = asyncio.create_task(asyncio.to_thread(watch_synchronously, client))
            for step in range(1, 4):
                chief.publish(step)
                assert [await asyncio.to_thread(sees.get, timeout=SECONDS) for _ in range(2)] == [step] * 2
                enough = watches() + 2
                await asyncio.to_thread(until, lambda: watches() >= enough)  # noqa: B023 - ends in this turn
        await watching_too
        watching.cancel()


CANCELS = 1_500
"""More than nghttp2 admits in the time of the test."""


def test_a_connection_on_which_a_caller_cancels_many_calls_beside_answered_ones_goes_on(served: Served) -> None:
    with served.channel() as channel:
        states: list[grpc.ChannelConnectivity] = []
        check, watch = channel.unary_unary(CHECK), channel.unary_stream(WATCH)
        check(b"", timeout=SECONDS, wait_for_ready=True)
        channel.subscribe(states.append)
        for _ in range(CANCELS):
            calls = [check.future(b"", timeout=SECONDS) for _ in range(2)]
            watch(b"", timeout=SECONDS).cancel()
            for call in calls:
                call.result()
        assert set(states) <= {grpc.ChannelConnectivity.READY}


def test_more_calls_than_a_connection_may_have_under_way_are_all_answered(served: Served) -> None:
    codes: Counter[grpc.StatusCode] = Counter()
    with served.channel() as channel:
        for _ in range(4):
            calls = [channel.unary_unary(PREDICT).future(REQUEST, timeout=2 * SECONDS) for _ in range(3 * MAX_STREAMS)]
            codes.update(call.code() for call in calls)
    assert codes == {grpc.StatusCode.OK: 12 * MAX_STREAMS}


def test_rapid_resets_are_cut_off_or_cost_others_little(served: Served) -> None:
    inputs = {"x": np.ones((1, WIDTH), np.float32)}
    with Client(served.grpc, timeout_seconds=SECONDS) as client, served.connect() as connection:
        client.predict(inputs)
        hostile = threading.Thread(target=reset_rapidly, args=(connection, PREDICT, 50_000))
        hostile.start()
        waits = []
        while hostile.is_alive():
            began = time.monotonic()
            assert client.predict(inputs).step == 2
            waits.append(time.monotonic() - began)
        assert max(waits) < LONGEST_WAIT_SECONDS


def test_a_call_that_ends_without_its_message_is_answered_at_once(served: Served) -> None:
    with served.channel() as channel:
        for call in (channel.stream_unary(PREDICT).future, channel.stream_stream(WATCH)):
            ended = call(iter(()), timeout=SECONDS)
            assert (ended.code(), ended.details()[:14]) == (grpc.StatusCode.INVALID_ARGUMENT, "got no message")


def test_a_call_with_more_than_a_hundred_header_fields_is_answered(served: Served) -> None:
    metadata = [(f"x-{number}", "v") for number in range(120)]
    with served.channel() as channel:
        assert channel.unary_unary(PREDICT)(REQUEST, timeout=SECONDS, metadata=metadata)


def test_headers_of_a_call_have_one_limit_on_both_front_ends_which_names_itself(served: Served) -> None:
    with served.channel() as channel:
        predict = channel.unary_unary(PREDICT)

        def call_with(value_bytes: int) -> None:
            metadata = [("x-first", "v" * value_bytes), ("x-second", "v" * value_bytes)]
            predict(REQUEST, timeout=SECONDS, metadata=metadata)

        call_with(30_000)
        for value_bytes in (31_000, 100_000, 100_000):  # a client knows the server's limit from its second call on
            with pytest.raises(grpc.RpcError) as refused:
                call_with(value_bytes)
            error: Any = refused.value
            assert (error.code(), "61440" in error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        call_with(30_000)


def test_headers_that_no_client_of_grpc_would_send_are_refused_too(served: Served) -> None:
    fields = {f"x-{number}": "v" * 15_000 for number in range(5)}
    with served.connect() as connection:
        assert call_compressed(connection, PREDICT, [gzip.compress(REQUEST)], headers=fields) == Counter({"8": 1})


def test_compressed_messages_hold_little_memory_before_they_are_refused(served: Served) -> None:
    bodies = [gzip.compress(bytes(size)) for size in (MESSAGE_BYTES, MESSAGE_BYTES + 1)]
    with served.channel() as channel, Client(served.grpc, timeout_seconds=SECONDS) as client:
        predict = channel.unary_unary(PREDICT)
        for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            assert predict(REQUEST, timeout=SECONDS, compression=compression) == predict(REQUEST, timeout=SECONDS)
        before = resident_peak(served.pid)
        with served.connect() as connection:
            statuses = call_compressed(connection, PREDICT, bodies * COMPRESSED_CALLS)
        assert statuses == Counter({"3": COMPRESSED_CALLS, "8": COMPRESSED_CALLS})
        assert resident_peak(served.pid) - before < SLACK_MIB * MIB
        assert client.predict({"x": np.ones((1, WIDTH), np.float32)}).step == 2


def test_an_idle_connection_ends_and_the_next_call_makes_a_new_one(idle: IdleChannel) -> None:
    """It comes behind the others with this server, as the connection has been idle while they ran."""
    until(lambda: idle.states[-1:] == [grpc.ChannelConnectivity.IDLE])
    idle.channel.unary_unary(PREDICT)(REQUEST, timeout=SECONDS)
    until(lambda: idle.states[-1:] == [grpc.ChannelConnectivity.READY])


def resident_peak(pid: int) -> int:
    """Return the most memory that a process has had resident so far, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_a_stream_whose_answers_are_not_taken_is_not_read_far_ahead(served: Served) -> None:
    """Else a hundred of them on a connection would hold gigabytes before any limit of the service applies."""
    inputs = encode_all({"x": np.ones((1000, WIDTH), np.float32)})
    message = prediction_pb2.PredictStreamRequest(request=prediction_pb2.PredictRequest(inputs=inputs))
    with served.connect() as connection:
        assert push_unread(connection, PREDICT_STREAM, message.SerializeToString(), 64 * MIB) < 20 * MIB


@pytest.mark.parametrize("served", FRONT_ENDS[1:], indirect=True)
def test_unfinished_bodies_hold_bounded_memory_and_a_caller_is_answered(served: Served) -> None:
    inputs = {"x": np.ones((1, WIDTH), np.float32)}
    with Client(served.grpc, timeout_seconds=SECONDS) as client, contextlib.ExitStack() as stack:
        assert client.predict(inputs).step == 2
        process = psutil.Process(served.pid)
        before = process.memory_info().rss
        hostile = [stack.enter_context(UnfinishedBodies(served.connect(), PREDICT)) for _ in range(CONNECTIONS)]
        for each in hostile:
            for _ in range(STREAMS):
                each.begin(BODY_BYTES)
        until(lambda: sum(each.push() for each in hostile) == 0)
        assert sum(each.refused for each in hostile) >= CONNECTIONS * STREAMS - BODY_MIB * MIB // BODY_BYTES
        assert client.predict(inputs).step == 2
        assert process.memory_info().rss - before < (BODY_MIB + SLACK_MIB) * MIB
        stack.close()
        assert client.predict(inputs).step == 2
