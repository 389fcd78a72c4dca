"""Measures what the check of a call's caller costs, in microseconds of CPU.

    python -m benchmarks.profile_callers

Each figure is the fastest of several rounds: the time of `CallerGuard.admit` and of giving back the call's share.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joserfc import jwt
from joserfc.jwk import ECKey, KeySet
from prometheus_client import CollectorRegistry

from understudy.service.callers.callers_file import DEFAULT_ALGORITHMS
from understudy.service.callers.directory import CallerDirectory
from understudy.service.callers.guard import CallerGuard
from understudy.service.callers.tokens import hash_text, new_token
from understudy.service.calls.caller import Group, only
from understudy.service.calls.methods import MessageCodec, Method
from understudy.service.calls.metrics import RefusalCounter, RpcMethod
from understudy.v1 import prediction_pb2

ROUNDS, CALLS = 7, 20_000
MICROSECONDS = 1e6
PREDICT = RpcMethod(service="understudy.v1.PredictionService", name="Predict", rpc_type="unary")


@dataclass
class _Call:
    """What the guard uses of a call."""

    authorization: str | None
    names: Sequence[str] = ()
    caller: Any = None
    share: Any = None

    def header(self, _name: str) -> str | None:
        """Return the authorization."""
        return self.authorization

    def certificate_names(self) -> Sequence[str]:
        """Return the names."""
        return self.names


def main() -> None:
    """Print the figures."""
    token, key = new_token(), ECKey.generate_key("P-256", {"kid": "k"})
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "keys.json").write_text(json.dumps(KeySet([key]).as_dict()), encoding="ascii")
        file = Path(folder, "callers.toml")
        file.write_text(
            f"[limits]\nmax_requests = 64\nmax_mib = 64\nmax_requests_per_second = 1e9\n"
            f'[[callers]]\nname = "a"\ngroups = ["predict"]\ntokens = ["{hash_text(token)}"]\ncertificates = ["a"]\n'
            '[[issuers]]\nname = "i"\nissuer = "i"\naudience = "u"\njwks = "keys.json"\n',
            encoding="ascii",
        )
        directory = CallerDirectory(file)
    guard = CallerGuard(directory, RefusalCounter(CollectorRegistry()))
    claims = {"iss": "i", "aud": "u", "sub": "s", "exp": int(time.time()) + 3600, "groups": ["predict"]}
    web_token = jwt.encode({"alg": "ES256", "kid": "k"}, claims, key)
    assert "ES256" in DEFAULT_ALGORITHMS
    codec = MessageCodec(prediction_pb2.PredictRequest)
    method = Method(rpc=PREDICT, access=only(Group.PREDICT), codec=codec, answer=_unused)
    for name, call in (
        ("token", _Call(f"Bearer {token}")),
        ("JSON Web Token, remembered", _Call(f"Bearer {web_token}")),
        ("certificate, names known", _Call(None, ("a",))),
    ):
        print(f"{name}: {_fastest(lambda call=call: _admit(guard, call, method), CALLS):.2f} us")  # type: ignore[misc]
    known = directory._known  # noqa: SLF001 - forgets what was verified

    def verify() -> None:
        known._verified.clear()  # noqa: SLF001
        _admit(guard, _Call(f"Bearer {web_token}"), method)

    print(f"JSON Web Token, verified: {_fastest(verify, CALLS // 100):.0f} us")


async def _unused(_request: Any, _call: Any) -> Any:
    raise NotImplementedError


def _admit(guard: CallerGuard, call: Any, method: Method) -> None:
    guard.admit(call, method)
    call.share.leave()


def _fastest(work: Callable[[], None], calls: int) -> float:
    """Return the CPU time of one call in microseconds."""
    fastest = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(calls):
            work()
        fastest = min(fastest, time.process_time() - began)
    return fastest / calls * MICROSECONDS


if __name__ == "__main__":
    main()
