"""Fuzzed requests over every RPC and every path of the HTTP port.

Some fields, elements or bits of valid requests are changed, and some requests were never valid.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from soak.fuzz_endpoints import Answer, Endpoint
    from testkit.served import Pair, Served

CALLERS: Final = 4
MAX_SHOWN: Final = 20
ROWS: Final = 2


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
        """Send the requests with these numbers, and record the answers."""
        for answer in self._pool.map(self._knock_once, numbers):
            self.answers[f"{answer.endpoint} {answer.status}"] += 1
            if not answer.allowed and len(self.faults) < MAX_SHOWN:
                self.faults.append(f"{answer.endpoint} answered {answer.status}: {answer.detail}")

    def _knock_once(self, number: int) -> Answer:
        chance = random.Random(f"{self._seed}-{number}")  # noqa: S311 - no secrets here
        return self._endpoint(number, chance).knock(chance)

    def _endpoint(self, number: int, chance: random.Random) -> Endpoint:
        """Return each endpoint once, then by their weights."""
        if number < len(self._endpoints):
            return self._endpoints[number]
        return chance.choices(self._endpoints, [endpoint.weight for endpoint in self._endpoints])[0]

    def _open(self, served: Served, model: str, inputs: Mapping[str, Any]) -> None:
        from soak.fuzz_endpoints import PATIENCE_SECONDS, endpoints_of

        channel = self._stack.enter_context(served.channel())
        http = self._stack.enter_context(served.http_client(PATIENCE_SECONDS))
        self._endpoints += endpoints_of(channel, http, model, inputs)
