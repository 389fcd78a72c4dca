"""Attacks and fuzzed requests beside an honest caller: it hardly waits, and nothing is written, falsified or kept.

Each session starts two real ``understudy serve`` processes with one of the front ends, with or without TLS: one with a
model of every datatype and one with a plain model. They receive fuzzed requests over every RPC and every path of the
HTTP port, and each attack of `attacks_on_servers` and `attacks_on_versions`. By turns an honest caller is alone, beside
an attack, and beside harmless requests from the same process, which take as long and as much of its processor time. So
what the caller waits longer beside the attack is the server's doing, and not that all of them share one machine.
Files that attack when they are loaded are those of the topic ``damage``.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from soak import attacks_on_versions
from soak.attacks_on_servers import ATTACKS, FLOODS, Attack
from soak.fuzz import Fuzzer
from soak.honest_caller import HonestCaller, quantiles
from soak.trial import Trial
from understudy.checkpoints.locks import LOCK_FILE

if TYPE_CHECKING:
    from testkit.served import Pair, Served

MESSAGES: Final = 200_000
SESSION: Final = 50_000
"""How many fuzzed messages one session sends. Its servers and its attacks take minutes, whatever this number is."""
TURN: Final = 250
TURNS: Final = 10
"""How many fuzzed messages are sent at a time, at least, and how many times in a session, about."""
SITES: Final = tuple((front_end, tls) for tls in (False, True) for front_end in ("grpcio", "envoy"))

MAX_LONGER_SECONDS: Final = 0.2
MAX_GROWTH_MIB: Final = 300
"""How much the memory of a server may grow while it is attacked."""
BOUNDS: Final = ("--max-message-mib", "64", "--max-body-mib", "64")
"""What unfinished bodies may hold leaves room below that; the attacks send ten times as much."""
MAX_KEPT_MIB: Final = 50
"""How much more memory a server may hold after the last round of attacks than after the second.

The first two fill the caches and the allocator: over five rounds 1426, 1442, 1460, 1442 and 1436 MiB were seen.
"""
ROUNDS: Final = 4

_ALONE_SECONDS: Final = 1.0
_SETTLE_SECONDS: Final = 15.0
"""How long servers have to give memory back after a round: they look after two, four and eight seconds."""
_SAMPLE_SECONDS: Final = 0.05
_PAUSE_SECONDS: Final = 0.001
_HARMLESS: Final = "harmless beside "
_SECONDS: Final = 30.0
_MEBIBYTE: Final = 2**20
_PREDICT: Final = "/understudy.v1.PredictionService/Predict"
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
        serving_both(folder / "runs", "--frontend", front_end, *BOUNDS, credentials=credentials, home=home) as pair,
        Fuzzer(pair, seed) as fuzzer,
        HonestCaller(pair.plain) as honest,
    ):
        floods = {} if front_end == "grpcio" else FLOODS
        attacks = {**ATTACKS, **floods, **attacks_on_versions.ATTACKS}
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
            memory.append(_settled_mib(pair))
    return {
        "faults": [*faults, *fuzzer.faults, *defects(pair.every), *defects(pair.plain)],
        "same_score": _score(pair.plain) == score,
        "files_written": sorted(_files(folder) - files),
        "memory_mib": {server: _growth([each[server] for each in memory]) for server in memory[0]},
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


def _resident_mib(pair: Pair) -> dict[str, float]:
    """Return the resident memory of each server, which with Envoy is that of Envoy, too, as it is one process."""
    resident = {name: psutil.Process(served.pid).memory_info().rss for name, served in vars(pair).items()}
    return {name: round(size / _MEBIBYTE, 1) for name, size in resident.items()}


def _settled_mib(pair: Pair) -> dict[str, float]:
    """Return the least resident memory of each server while they give back what a round of attacks took."""
    least, over = _resident_mib(pair), time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < over:
        time.sleep(_SAMPLE_SECONDS)
        least = {name: min(least[name], size) for name, size in _resident_mib(pair).items()}
    return least


def _growth(seen: Sequence[float]) -> dict[str, Any]:
    before, *settled, most = seen
    return {"before": before, "most": most, "after_rounds": settled}


@contextmanager
def _memory_of(pair: Pair) -> Iterator[list[dict[str, float]]]:
    """Yield a list of the memory of each server now; append the most that was seen at the end of the block."""
    memory = [_resident_mib(pair)]
    most = memory[0]
    over = threading.Event()

    def sample() -> None:
        nonlocal most
        while not over.wait(_SAMPLE_SECONDS):
            most = {name: max(most[name], size) for name, size in _resident_mib(pair).items()}

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
    for server, memory in session["memory_mib"].items():
        _, second, *_, last = memory["after_rounds"]
        if memory["most"] > memory["before"] + MAX_GROWTH_MIB or last > second + MAX_KEPT_MIB:
            yield f"session {number}: the memory of {server} was {memory} MiB"
