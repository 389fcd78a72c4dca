"""Fuzzed requests over every RPC and every path of the HTTP port: no crash, no INTERNAL, no hang, no growth in memory.

Two real ``understudy serve`` processes, one with a model of every datatype and one with a plain model, receive
requests with some fields, elements or bits changed, and requests that were never valid. The memory of the processes is
sampled after every part. It has grown if the median of the last fifth of the samples exceeds that of the third fifth by
more than a twentieth.
"""

from __future__ import annotations

import os
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Self

import grpc
import psutil

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from soak.trial import Trial

if TYPE_CHECKING:
    from soak.fuzz_endpoints import Answer, Endpoint
    from testkit.served import Pair, Served

REQUESTS: Final = 100_000
PART: Final = 500
CALLERS: Final = 4
MAX_SHOWN: Final = 20
MAX_GROWTH: Final = 1.05
ROWS: Final = 2

_MEBIBYTE: Final = 2**20
_FEWEST_LOOKS: Final = 10


class Fuzzer:
    """Calls every endpoint of two servers. A context manager.

    Args:
        pair: The servers.
        seed: Seed of the requests: the same number gives the same requests.
    """

    def __init__(self, pair: Pair, seed: int) -> None:
        self._pair = pair
        self._seed = seed
        self._stack = ExitStack()
        self._endpoints: list[Endpoint] = []
        self.answers: Counter[str] = Counter()
        self.faults: list[str] = []
        self.memory_mib: dict[str, list[float]] = {"every": [], "plain": []}

    def __enter__(self) -> Self:
        from testkit.values import DTYPES, EVERY, PLAIN, values

        every = {f"in_{dtype}": values(dtype, rows=ROWS) for dtype in DTYPES}
        self._open(self._pair.every, EVERY, every)
        self._open(self._pair.plain, PLAIN, {"x": values("float32", rows=ROWS)})
        self._pool = self._stack.enter_context(ThreadPoolExecutor(CALLERS, thread_name_prefix="fuzz"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def endpoint_names(self) -> set[str]:
        """All endpoints."""
        return {endpoint.name for endpoint in self._endpoints}

    def knock(self, numbers: range) -> None:
        """Send the requests with these numbers, record the answers, and sample the memory."""
        for answer in self._pool.map(self._knock_once, numbers):
            self.answers[f"{answer.endpoint} {answer.status}"] += 1
            if not answer.allowed and len(self.faults) < MAX_SHOWN:
                self.faults.append(f"{answer.endpoint} answered {answer.status}: {answer.detail}")
        for name, pid in (("every", self._pair.every.pid), ("plain", self._pair.plain.pid)):
            self.memory_mib[name].append(round(psutil.Process(pid).memory_info().rss / _MEBIBYTE, 1))

    def _knock_once(self, number: int) -> Answer:
        chance = random.Random(f"{self._seed}-{number}")  # noqa: S311 - no secrets here
        return self._endpoint(number, chance).knock(chance)

    def _endpoint(self, number: int, chance: random.Random) -> Endpoint:
        """Return each endpoint once, then by their weights."""
        if number < len(self._endpoints):
            return self._endpoints[number]
        return chance.choices(self._endpoints, [endpoint.weight for endpoint in self._endpoints])[0]

    def _open(self, served: Served, model: str, inputs: Mapping[str, Any]) -> None:
        from soak.fuzz_endpoints import RestEndpoint, endpoints_of

        channel = self._stack.enter_context(grpc.insecure_channel(served.grpc))
        endpoints = list(endpoints_of(channel, served.http, model, inputs))
        for endpoint in endpoints:
            if isinstance(endpoint, RestEndpoint):
                self._stack.callback(endpoint.close)
        self._endpoints += endpoints


def has_grown(looks: Sequence[float]) -> bool:
    """Whether memory was larger in the last fifth of the samples than in the third; False if there are too few."""
    if len(looks) < _FEWEST_LOOKS:
        return False
    fifth = len(looks) // 5
    third, last = looks[2 * fifth : 3 * fifth], looks[-fifth:]
    return statistics.median(last) > MAX_GROWTH * statistics.median(third)


def run(trial: Trial) -> None:
    """Send the requests, part by part; resume an interrupted trial."""
    from testkit.served import serving_both

    count = trial.count(REQUESTS)
    state = trial.load_state()
    done: int = state.get("done", 0)
    earlier = Counter(state.get("answers", {}))
    with serving_both(trial.work / f"from-{done}") as pair, Fuzzer(pair, trial.seed) as fuzzer:
        while done < count:
            part = min(PART, count - done)
            fuzzer.knock(range(done, done + part))
            done += part
            answers = earlier + fuzzer.answers
            _report(trial, fuzzer, done, answers)
            trial.save_state({"done": done, "answers": answers})
            if fuzzer.faults:
                break
    if done == count:
        trial.finish()


def _report(trial: Trial, fuzzer: Fuzzer, done: int, answers: Mapping[str, int]) -> None:
    statuses: Counter[str] = Counter()
    for answer, times in answers.items():
        statuses[answer.split()[-1]] += times
    grown = [name for name, looks in fuzzer.memory_mib.items() if has_grown(looks)]
    trial.report(
        held=not fuzzer.faults and not grown,
        requests=done,
        endpoints=len(fuzzer.endpoint_names),
        statuses=dict(statuses.most_common()),
        faults=fuzzer.faults,
        grown=grown,
        memory_mib=fuzzer.memory_mib,
        answers=dict(sorted(answers.items())),
    )
