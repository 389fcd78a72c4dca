"""Attacks on a server: each sends what costs or holds much, and yields what should not have been answered or done."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

import grpc

from soak import attacks_on_versions

if TYPE_CHECKING:
    from testkit.served import Served

_ATTACK_SECONDS: Final = 1.0
_FLOOD_SECONDS: Final = 5.0
_SECONDS: Final = 30.0
_MEBIBYTE: Final = 2**20
_PREDICT: Final = "/understudy.v1.PredictionService/Predict"
_EVALUATE: Final = "/understudy.v1.EvaluationService/Evaluate"
_WATCH: Final = "/understudy.v1.EvaluationService/WatchEvaluations"
_COMPARE: Final = "/understudy.v1.EvaluationService/Compare"
_REPLAY: Final = "/understudy.v1.EvaluationService/Replay"


def costly_requests(served: Served) -> Iterator[str]:
    """Send messages and bodies that cost much for their size."""
    from soak.fuzz_endpoints import UNTOLD
    from testkit.costly_messages import costly_bodies, costly_messages

    paths = {
        "inference.ModelInferRequest": "/inference.GRPCInferenceService/ModelInfer",
        "understudy.v1.PredictRequest": _PREDICT,
        "tensorflow.serving.PredictRequest": "/tensorflow.serving.PredictionService/Predict",
    }
    with served.channel() as channel, served.http_client(_SECONDS) as http:
        for name, message_type, data in costly_messages():
            if message_type.DESCRIPTOR.full_name not in paths:
                continue
            try:
                channel.unary_unary(paths[message_type.DESCRIPTOR.full_name])(data, timeout=_SECONDS)
            except grpc.RpcError as error:
                if error.code() in UNTOLD:
                    yield f"{name}: {error.code()} {error.details()}"
        for body in costly_bodies():
            response = http.post("/v2/models/plain/infer", content=body)
            if response.status_code != 400:
                yield f"{body[:100]!r}: {response.status_code} {response.text}"


def many_messages(served: Served) -> Iterator[str]:
    """Make calls that take one message, with hundreds of thousands of empty ones in their bodies."""
    from testkit.hostile_connections import call_with_bodies

    statuses: Counter[str] = Counter()
    ends = time.monotonic() + _ATTACK_SECONDS
    while time.monotonic() < ends:
        with served.connect() as connection:
            statuses += call_with_bodies(connection, _PREDICT, [bytes(5) * 400_000] * 2)
    if not statuses.keys() <= {str(grpc.StatusCode.INVALID_ARGUMENT.value[0]), "reset"}:
        yield f"bodies of many messages: {statuses}"


def unfinished_bodies(served: Served) -> Iterator[str]:
    """Begin 80 bodies of a mebibyte and end none, which every front end holds: a caller is answered beside them.

    The grpcio front end would hold any number of bytes (docs/decisions/connections.md), so there are no more here.
    """
    _push_bodies(served, streams=80, size=_MEBIBYTE, seconds=_ATTACK_SECONDS)
    yield from ()


def flood_of_bodies(served: Served) -> Iterator[str]:
    """Begin bodies of ten times the memory that they may hold together, and end none."""
    _push_bodies(served, streams=240, size=4 * _MEBIBYTE, seconds=_FLOOD_SECONDS)
    yield from ()


def _push_bodies(served: Served, *, streams: int, size: int, seconds: float) -> None:
    from testkit.hostile_connections import UnfinishedBodies

    with ExitStack() as stack:
        hostile = [stack.enter_context(UnfinishedBodies(served.connect(), _PREDICT)) for _ in range(4)]
        for each in hostile:
            for _ in range(streams // len(hostile)):
                each.begin(size)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            for each in hostile:
                each.push()


def silent_connections(served: Served) -> Iterator[str]:
    """Connect and say nothing."""
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(served.connect())
        time.sleep(_ATTACK_SECONDS)
    yield from ()


def large_evaluations(served: Served) -> Iterator[str]:
    """Begin evaluations that send large batches at once, two thirds of the bytes that every front end holds."""
    yield from _evaluate_at_once(served, streams=8, size=8 * _MEBIBYTE)


def flood_of_evaluations(served: Served) -> Iterator[str]:
    """Begin evaluations that send ten times the memory that their messages may hold together."""
    yield from _evaluate_at_once(served, streams=32, size=32 * _MEBIBYTE)


def _evaluate_at_once(served: Served, *, streams: int, size: int) -> Iterator[str]:
    """Evaluate batches of this many bytes, which are in a feature of two examples."""
    import numpy as np

    from testkit.values import WIDTH
    from understudy.v1 import evaluation_pb2
    from understudy.wire import encode_all

    x = np.ones((2, WIDTH), np.float32)
    batch = evaluation_pb2.EvaluateBatch(
        inputs=encode_all({"x": x}),
        targets=encode_all({"targets": x}),
        features=encode_all({"large": np.ones((2, size // 8), np.float32)}),
    )
    request = evaluation_pb2.EvaluateRequest(batch=batch).SerializeToString()
    options = ("grpc.use_local_subchannel_pool", 1)  # else they would share a connection
    with ExitStack() as stack:
        channels = [stack.enter_context(served.channel(options)) for _ in range(4)]
        calls = [
            channels[number % len(channels)].stream_unary(_EVALUATE).future(iter([request] * 2), timeout=_SECONDS)
            for number in range(streams)
        ]
        statuses = Counter(call.code() for call in calls)
    if not statuses.keys() <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}:
        yield f"evaluations of large batches: {statuses}"


def quiet_streams(served: Served) -> Iterator[str]:
    """Begin streams of evaluations and comparisons, and send no batches."""
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        over.wait(_SECONDS)
        yield from ()

    with served.channel() as channel:
        for path in (_EVALUATE, _COMPARE) * 4:
            channel.stream_unary(path).future(nothing(), timeout=_SECONDS)
        time.sleep(_ATTACK_SECONDS)
        over.set()
    yield from ()


def held_versions(served: Served) -> Iterator[str]:
    """Send a batch on streams that score, compare and replay to every version, then nothing; another one is scored."""
    from testkit.values import PLAIN_STEPS
    from understudy.v1 import evaluation_pb2, tensor_pb2

    versions = [tensor_pb2.VersionSelector(step=step) for step in PLAIN_STEPS]
    evaluation = _evaluation_batch()
    batch = evaluation_pb2.EvaluateRequest.FromString(evaluation).batch
    comparison = evaluation_pb2.CompareRequest(batch=batch).SerializeToString()
    replayed = evaluation_pb2.ReplayRequest(batch=evaluation_pb2.ReplayBatch(inputs=batch.inputs)).SerializeToString()
    over = threading.Event()

    def begun(*messages: bytes) -> Iterator[bytes]:
        yield from messages
        over.wait(_SECONDS)

    with served.channel() as channel:
        evaluate, compare = (channel.stream_unary(path) for path in (_EVALUATE, _COMPARE))
        replay = channel.stream_stream(_REPLAY)
        for version in versions:
            options = evaluation_pb2.EvaluateOptions(version=version)
            first = evaluation_pb2.EvaluateRequest(options=options).SerializeToString()
            evaluate.future(begun(first, evaluation), timeout=_SECONDS)
            comparing = evaluation_pb2.CompareOptions(versions=versions)
            first = evaluation_pb2.CompareRequest(options=comparing).SerializeToString()
            compare.future(begun(first, comparison), timeout=_SECONDS)
            replaying = evaluation_pb2.ReplayOptions(version=version)
            first = evaluation_pb2.ReplayRequest(options=replaying).SerializeToString()
            replay(begun(first, replayed, replayed), timeout=_SECONDS)
        time.sleep(_ATTACK_SECONDS)
        over.set()
        try:
            evaluate(iter([evaluation]), timeout=_SECONDS)
        except grpc.RpcError as error:
            yield f"beside streams that hold versions: {error.code()} {error.details()}"


def unfinished_http_bodies(served: Served) -> Iterator[str]:
    """Begin REST requests and end none: headers, and bodies of ten times the memory that they may hold together."""
    start = f"POST /v2/models/plain/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {16 * _MEBIBYTE}\r\n"
    piece = bytes(_MEBIBYTE)
    with ExitStack() as stack:
        for _ in range(16):
            _http_connection(served, stack).sendall(start.encode())
        connections = [_http_connection(served, stack) for _ in range(64)]
        for connection in connections:
            connection.sendall(f"{start}\r\n".encode())
        ends = time.monotonic() + _FLOOD_SECONDS
        for _ in range(15):
            for connection in connections:
                if time.monotonic() < ends:
                    with suppress(OSError):  # the server has refused it
                        connection.sendall(piece)
        time.sleep(_ATTACK_SECONDS)
    yield from ()


def small_chunks(served: Served) -> Iterator[str]:
    """Send bodies in chunks of one byte, as fast as the server takes them."""
    start = b"POST /v2/models/plain/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"1\r\nx\r\n" * 20_000
    with ExitStack() as stack:
        connections = [_http_connection(served, stack) for _ in range(16)]
        for connection in connections:
            connection.sendall(start)
            connection.settimeout(0.05)
        ends = time.monotonic() + _ATTACK_SECONDS
        while time.monotonic() < ends:
            for connection in connections:
                with suppress(OSError):  # it takes no more for now, or has refused it
                    connection.sendall(chunks)
    yield from ()


def cancelled_calls(served: Served) -> Iterator[str]:
    """Cancel 60 calls a second; others on the same connection are answered."""
    from testkit.values import values
    from understudy.v1 import prediction_pb2
    from understudy.wire import encode_all

    honest = prediction_pb2.PredictRequest(inputs=encode_all({"x": values("float32")})).SerializeToString()
    with served.channel() as channel:
        watch = channel.unary_stream(_WATCH)
        ends = time.monotonic() + _ATTACK_SECONDS
        while time.monotonic() < ends:
            call = watch(b"", timeout=_SECONDS)
            time.sleep(1 / 60)
            call.cancel()
        try:
            channel.unary_unary(_PREDICT)(honest, timeout=_SECONDS)
        except grpc.RpcError as error:
            yield f"beside cancelled calls: {error.code()} {error.details()}"


def rapid_resets(served: Served) -> Iterator[str]:
    """Begin calls and cancel each at once, on one connection after another."""
    from testkit.hostile_connections import reset_rapidly

    ends = time.monotonic() + _ATTACK_SECONDS
    while time.monotonic() < ends:
        with served.connect() as connection, suppress(OSError):
            reset_rapidly(connection, _PREDICT, 5000)
    yield from ()


def compressed_calls(served: Served) -> Iterator[str]:
    """Call with messages that are a thousand times as large when they are decompressed."""
    from testkit.hostile_connections import call_compressed

    with served.connect() as connection:
        statuses = call_compressed(connection, _PREDICT, [gzip.compress(bytes(8 * _MEBIBYTE))] * 10)
    if set(statuses) != {str(grpc.StatusCode.INVALID_ARGUMENT.value[0])}:
        yield f"compressed zeros: {statuses}"


def many_calls(served: Served) -> Iterator[str]:
    """Begin three times as many calls on a connection as the server admits: one caller heeds that, another does not.

    An evaluation that begins beside them waits for its turn.
    """
    from testkit.hostile_connections import begin_calls
    from testkit.values import values
    from understudy.v1 import prediction_pb2
    from understudy.wire import encode_all

    honest = prediction_pb2.PredictRequest(inputs=encode_all({"x": values("float32")})).SerializeToString()
    with served.connect() as connection, served.channel() as channel:
        begin_calls(connection, _PREDICT, 300)
        calls = [channel.unary_unary(_PREDICT).future(honest, timeout=_SECONDS) for _ in range(300)]
        evaluation = channel.stream_unary(_EVALUATE).future(iter([_evaluation_batch()]), timeout=_SECONDS)
        statuses = Counter(call.code() for call in calls)
        scored = evaluation.code()
        time.sleep(_ATTACK_SECONDS)
    if scored is not grpc.StatusCode.OK:
        yield f"an evaluation beside many calls: {scored} {evaluation.details()}"
    if set(statuses) != {grpc.StatusCode.OK}:
        yield f"300 calls on one connection: {statuses}"


def watches(served: Served) -> Iterator[str]:
    """Watch health and evaluations and follow the evaluator by many names, on connection after connection."""
    from understudy.v1 import fleet_pb2

    over = threading.Event()

    def reports(number: int) -> Iterator[bytes]:
        yield fleet_pb2.FollowRequest(name=f"{number}-" * 40, reason="x" * 100_000).SerializeToString()
        over.wait(_SECONDS)

    with ExitStack() as stack:
        calls = []
        for begin in range(0, 600, 60):
            channel = stack.enter_context(served.channel())
            for number in range(begin, begin + 60, 3):
                calls.append(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=_SECONDS))
                calls.append(channel.unary_stream(_WATCH)(b"", timeout=_SECONDS))
                follow = channel.stream_stream("/understudy.v1.FleetService/Follow")
                calls.append(follow(reports(number), timeout=_SECONDS))
        time.sleep(_ATTACK_SECONDS)
        over.set()
        for call in calls:
            call.cancel()
    yield from ()


def open_pages(served: Served) -> Iterator[str]:
    """Open the events of pages and read none of them."""
    with ExitStack() as stack:
        for number in range(200):
            connection = _http_connection(served, stack)
            path = "/events" if number % 2 else "/checkpoints/3/events"
            with suppress(OSError):
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        time.sleep(_ATTACK_SECONDS)
    yield from ()


def _evaluation_batch() -> bytes:
    import numpy as np

    from testkit.values import WIDTH
    from understudy.v1 import evaluation_pb2
    from understudy.wire import encode_all

    x = np.ones((2, WIDTH), np.float32)
    batch = evaluation_pb2.EvaluateBatch(inputs=encode_all({"x": x}), targets=encode_all({"targets": x}))
    content: bytes = evaluation_pb2.EvaluateRequest(batch=batch).SerializeToString()
    return content


def _http_connection(served: Served, stack: ExitStack) -> socket.socket:
    host, port = served.http.rsplit(":", 1)
    connection: socket.socket = socket.create_connection((host, int(port)), _SECONDS)
    if served.credentials is not None:
        connection = served.credentials.context().wrap_socket(connection, server_hostname=host)
    return stack.enter_context(connection)


Attack = Callable[["Served"], Iterator[str]]
"""Yields what the server should not have answered or done."""

ATTACKS: Final[Mapping[str, Attack]] = {
    attack.__name__: attack
    for attack in (
        costly_requests,
        compressed_calls,
        many_messages,
        unfinished_bodies,
        unfinished_http_bodies,
        small_chunks,
        silent_connections,
        large_evaluations,
        quiet_streams,
        held_versions,
        cancelled_calls,
        rapid_resets,
        many_calls,
        watches,
        open_pages,
        attacks_on_versions.imitated_requests,
    )
}
"""Those that leave what is serving as it is."""
FLOODS: Final[Mapping[str, Attack]] = {attack.__name__: attack for attack in (flood_of_bodies, flood_of_evaluations)}
"""Those that a front end must bound in memory, as all but grpcio do."""
