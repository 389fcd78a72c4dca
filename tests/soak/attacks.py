"""Attacks and fuzzed requests beside an honest caller: it hardly waits, and nothing is written, falsified or kept.

Each session starts two real ``understudy serve`` processes with one of the front ends, with or without TLS: one with a
model of every datatype and one with a plain model. They receive fuzzed requests over every RPC and every path of the
HTTP port, and each attack of `ATTACKS`. By turns an honest caller is alone, beside an attack, and beside harmless
requests from the same process, which take as long and as much of its processor time. So what the caller waits longer
beside the attack is the server's doing, and not that all of them share one machine.
Files that attack when they are loaded are those of the topic ``damage``.
"""

from __future__ import annotations

import gzip
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import psutil

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from soak import attacks_on_versions
from soak.fuzz import Fuzzer
from soak.honest_caller import HonestCaller, quantiles
from soak.trial import Trial
from understudy.checkpoints.locks import LOCK_FILE

if TYPE_CHECKING:
    from testkit.served import Pair, Served

MESSAGES: Final = 200_000
SESSION: Final = 25_000
"""How many fuzzed messages one session sends. Its servers and its attacks take minutes, whatever this number is."""
TURN: Final = 250
TURNS: Final = 10
"""How many fuzzed messages are sent at a time, at least, and how many times in a session, about."""
SITES: Final = tuple((front_end, tls) for tls in (False, True) for front_end in ("grpcio", "envoy"))

MAX_LONGER_SECONDS: Final = 0.2
MAX_GROWTH_MIB: Final = 300
MAX_KEPT_MIB: Final = 50
"""How much more memory the servers may hold after the last round of attacks than after the first, with its caches."""
ROUNDS: Final = 3

_ALONE_SECONDS: Final = 1.0
_ATTACK_SECONDS: Final = 1.0
_SETTLE_SECONDS: Final = 3.0
_SAMPLE_SECONDS: Final = 0.05
_PAUSE_SECONDS: Final = 0.001
_HARMLESS: Final = "harmless beside "
_SECONDS: Final = 30.0
_MEBIBYTE: Final = 2**20
_PREDICT: Final = "/understudy.v1.PredictionService/Predict"
_EVALUATE: Final = "/understudy.v1.EvaluationService/Evaluate"
_WATCH: Final = "/understudy.v1.EvaluationService/WatchEvaluations"
_COMPARE: Final = "/understudy.v1.EvaluationService/Compare"
_DEFECTS: Final = r'grpc_server_handled_total{grpc_code="(?:Internal|Unknown)",grpc_method="(\w+)",[^}]*} (\S+)'


def harmless_requests(served: Served, load: Load) -> None:
    """Send requests that are answered, for the time and with the processor time of what they are compared with."""
    from testkit.values import values
    from understudy.v1 import prediction_pb2
    from understudy.wire import encode_all

    request = prediction_pb2.PredictRequest(inputs=encode_all({"x": values("float32")})).SerializeToString()
    began, before = time.monotonic(), time.process_time()
    with served.channel() as channel:
        predict = channel.unary_unary(_PREDICT)
        while (elapsed := time.monotonic() - began) < load.seconds:
            if time.process_time() - before < load.processor_seconds * elapsed / load.seconds:
                predict(request, timeout=_SECONDS)
            else:
                time.sleep(_PAUSE_SECONDS)


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
    """Begin 80 bodies and end none."""
    from testkit.hostile_connections import UnfinishedBodies

    with ExitStack() as stack:
        hostile = [stack.enter_context(UnfinishedBodies(served.connect(), _PREDICT)) for _ in range(4)]
        for each in hostile:
            for _ in range(20):
                each.begin(_MEBIBYTE)
        ends = time.monotonic() + _ATTACK_SECONDS
        while time.monotonic() < ends:
            for each in hostile:
                each.push()
    yield from ()


def silent_connections(served: Served) -> Iterator[str]:
    """Connect and say nothing."""
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(served.connect())
        time.sleep(_ATTACK_SECONDS)
    yield from ()


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
    """Send a batch on streams of evaluations and comparisons of every version, then nothing; another one is scored."""
    from testkit.values import PLAIN_STEPS
    from understudy.v1 import evaluation_pb2, tensor_pb2

    versions = [tensor_pb2.VersionSelector(step=step) for step in PLAIN_STEPS]
    evaluation = _evaluation_batch()
    batch = evaluation_pb2.EvaluateRequest.FromString(evaluation).batch
    comparison = evaluation_pb2.CompareRequest(batch=batch).SerializeToString()
    over = threading.Event()

    def begun(*messages: bytes) -> Iterator[bytes]:
        yield from messages
        over.wait(_SECONDS)

    with served.channel() as channel:
        evaluate, compare = (channel.stream_unary(path) for path in (_EVALUATE, _COMPARE))
        for version in versions:
            options = evaluation_pb2.EvaluateOptions(version=version)
            first = evaluation_pb2.EvaluateRequest(options=options).SerializeToString()
            evaluate.future(begun(first, evaluation), timeout=_SECONDS)
            comparing = evaluation_pb2.CompareOptions(versions=versions)
            first = evaluation_pb2.CompareRequest(options=comparing).SerializeToString()
            compare.future(begun(first, comparison), timeout=_SECONDS)
        time.sleep(_ATTACK_SECONDS)
        over.set()
        try:
            evaluate(iter([evaluation]), timeout=_SECONDS)
        except grpc.RpcError as error:
            yield f"beside streams that hold versions: {error.code()} {error.details()}"


def unfinished_http_bodies(served: Served) -> Iterator[str]:
    """Begin REST requests and end none: their headers, or bodies of a mebibyte."""
    with ExitStack() as stack:
        connections = [_http_connection(served, stack) for _ in range(40)]
        for number, connection in enumerate(connections):
            start = f"POST /v2/models/plain/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2 * _MEBIBYTE}\r\n"
            with suppress(OSError):
                connection.sendall(start.encode() if number % 2 else f"{start}\r\n".encode() + bytes(_MEBIBYTE))
        time.sleep(_ATTACK_SECONDS)
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
        statuses = call_compressed(connection, _PREDICT, [gzip.compress(bytes(16 * _MEBIBYTE))] * 10)
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
        silent_connections,
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


def run(trial: Trial) -> None:
    """Send the messages, session by session; resume an interrupted trial."""
    count = trial.count(MESSAGES)
    state = trial.load_state()
    sessions: list[dict[str, Any]] = state.get("sessions", [])
    while (done := sum(session["messages"] for session in sessions)) < count:
        front_end, tls = SITES[len(sessions) % len(SITES)]
        numbers = range(done, min(done + SESSION, count))
        sessions.append(session(trial.work / f"session-{len(sessions)}", front_end, trial.seed, numbers, tls=tls))
        trial.save_state({"sessions": sessions})
        _report(trial, sessions)
    _report(trial, sessions)
    trial.finish()


def session(folder: Path, front_end: str, seed: int, numbers: range, *, tls: bool) -> dict[str, Any]:
    """Attack one pair of servers; return what was seen."""
    import trustme

    from testkit.certificates import Credentials
    from testkit.served import serving_both

    home = folder / "home"
    home.mkdir(parents=True)
    credentials = Credentials(folder / "tls", trustme.CA(), "127.0.0.1") if tls else None
    with (
        serving_both(folder / "runs", "--frontend", front_end, credentials=credentials, home=home) as pair,
        Fuzzer(pair, seed) as fuzzer,
        HonestCaller(pair.plain) as honest,
    ):
        attacks = {**ATTACKS, **attacks_on_versions.ATTACKS}
        early = _load_some_versions(pair.plain)
        seen = attacked(pair, fuzzer, honest, numbers, folder, attacks=attacks)
    waits = {phase: honest.waits[phase] for phase in (*attacks, "fuzz") if honest.waits[phase]}
    harmless = {phase: honest.waits["alone"] + honest.waits[_HARMLESS + phase] for phase in waits}
    longer = {phase: round(max(found) - max(harmless[phase]), 3) for phase, found in waits.items()}
    return {
        "front_end": front_end,
        "tls": tls,
        "messages": len(numbers),
        **seen,
        "faults": [*early, *seen["faults"]],
        "honest_failures": honest.failures[:10],
        "waits_ms": {
            phase: quantiles(found)
            for phase, found in honest.waits.items()
            if phase == "alone" or phase.removeprefix(_HARMLESS) in waits
        },
        "longer_seconds": {phase: value for phase, value in longer.items() if value > MAX_LONGER_SECONDS},
    }


def _load_some_versions(served: Served) -> list[str]:
    """Have new versions loaded, as what the first few leave in memory is no attacker's doing; return the faults."""
    return [fault for _ in range(ROUNDS) for attack in attacks_on_versions.ATTACKS.values() for fault in attack(served)]


def attacked(
    pair: Pair,
    fuzzer: Fuzzer,
    honest: HonestCaller,
    numbers: range,
    folder: Path,
    *,
    attacks: Mapping[str, Attack] = ATTACKS,
) -> dict[str, Any]:
    """Attack servers by turns with the honest caller alone; return what was seen."""
    turn = max(TURN, len(numbers) // TURNS)
    fuzzer.knock(numbers[:turn])
    score, files = _score(pair.plain), _files(folder)
    faults: list[str] = []
    turns = range(turn, len(numbers), turn)
    with _memory_of(pair) as memory:
        for number in range(ROUNDS):
            for name, attack in attacks.items():
                with _beside(honest, name, pair.plain):
                    faults += attack(pair.plain)
            for start in turns[number::ROUNDS]:
                with _beside(honest, "fuzz", pair.plain):
                    fuzzer.knock(numbers[start : start + turn])
            time.sleep(_SETTLE_SECONDS)
            memory.append(_resident_mib(pair))
    before, *settled, most = memory
    return {
        "faults": [*faults, *fuzzer.faults, *defects(pair.every), *defects(pair.plain)],
        "same_score": _score(pair.plain) == score,
        "files_written": sorted(_files(folder) - files),
        "memory_mib": {"before": before, "most": most, "after_rounds": settled},
        "statuses": dict(Counter(answer.split()[-1] for answer in fuzzer.answers.elements()).most_common()),
    }


@dataclass(frozen=True, kw_only=True)
class Load:
    """How long something took, and the processor time of this process meanwhile."""

    seconds: float
    processor_seconds: float


@contextmanager
def _beside(honest: HonestCaller, phase: str, served: Served) -> Iterator[None]:
    """Leave the honest caller alone, count its calls during the block to a phase, then those beside as much load."""
    with honest.during("alone"):
        time.sleep(_ALONE_SECONDS)
    began, before = time.monotonic(), time.process_time()
    with honest.during(phase):
        yield
    load = Load(seconds=time.monotonic() - began, processor_seconds=time.process_time() - before)
    with honest.during(_HARMLESS + phase):
        harmless_requests(served, load)


def defects(served: Served) -> Iterator[str]:
    """Yield the calls that the server counts as failed on a defect, also those whose caller did not wait for it."""
    with served.http_client(_SECONDS) as http:
        exposition = http.get("/metrics").text
    for method, count in re.findall(_DEFECTS, exposition):
        if float(count):
            yield f"{method} failed on a defect {float(count):.0f} times"


def _resident_mib(pair: Pair) -> float:
    """Return the resident memory of both servers."""
    resident = sum(psutil.Process(served.pid).memory_info().rss for served in (pair.every, pair.plain))
    return round(resident / _MEBIBYTE, 1)


@contextmanager
def _memory_of(pair: Pair) -> Iterator[list[float]]:
    """Yield a list of the memory now; append the most that was seen at the end of the block."""
    memory = [_resident_mib(pair)]
    most = memory[0]
    over = threading.Event()

    def sample() -> None:
        nonlocal most
        while not over.wait(_SAMPLE_SECONDS):
            most = max(most, _resident_mib(pair))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield memory
    finally:
        over.set()
        sampler.join()
        memory.append(most)


def _score(served: Served) -> dict[str, float]:
    import numpy as np

    from testkit.values import PLAIN_STEPS, WIDTH
    from understudy.clients import Client

    x = np.linspace(0, 1, 8 * WIDTH, dtype=np.float32).reshape(8, WIDTH)
    credentials = None if served.credentials is None else served.credentials.channel()
    with Client(served.grpc, credentials=credentials) as client:
        return dict(
            client.evaluate(
                [(x, x * x)], version=PLAIN_STEPS[-1], metrics=["mae", "mean_absolute_percentage_error"]
            ).metrics
        )


def _files(folder: Path) -> set[str]:
    """Return the files of the servers, with sizes and times, but for their states and the lock of the publisher."""
    files = (
        file
        for file in folder.rglob("*")
        if file.is_file() and "evaluator" not in file.parts and file.name != LOCK_FILE
    )
    return {f"{file.relative_to(folder)} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files}


def _report(trial: Trial, sessions: list[dict[str, Any]]) -> None:
    broken = [text for number, session in enumerate(sessions) for text in _broken(number, session)]
    trial.report(
        held=not broken,
        messages=sum(session["messages"] for session in sessions),
        broken=broken,
        sessions=sessions,
    )


def _broken(number: int, session: Mapping[str, Any]) -> Iterator[str]:
    """Yield what did not hold in a session."""
    if session["faults"] or session["honest_failures"]:
        yield f"session {number}: {(session['faults'] + session['honest_failures'])[:3]}"
    if session["longer_seconds"]:
        longer = session["longer_seconds"]
        yield f"session {number}: the honest caller waited longer than beside harmless requests by {longer} s"
    if not session["same_score"]:
        yield f"session {number}: the score changed"
    if session["files_written"]:
        yield f"session {number}: files were written: {session['files_written'][:3]}"
    memory = session["memory_mib"]
    first, *_, last = memory["after_rounds"]
    if memory["most"] > memory["before"] + MAX_GROWTH_MIB or last > first + MAX_KEPT_MIB:
        yield f"session {number}: the memory was {memory} MiB"
