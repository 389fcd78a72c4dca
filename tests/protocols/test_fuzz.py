"""A sample of what `soak/attacks.py` does in great numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from protocols.conftest import ROOT

from testkit.served import Pair

REQUESTS = 400


def test_no_request_and_no_attack_makes_the_server_fail(
    served: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from soak import attacks
    from soak.fuzz import Fuzzer
    from soak.honest_caller import HonestCaller

    for name, value in {"_ALONE_SECONDS": 0.05, "_ATTACK_SECONDS": 0.4, "_SETTLE_SECONDS": 0.0, "ROUNDS": 1}.items():
        monkeypatch.setattr(attacks, name, value)
    with Fuzzer(served, seed=1) as fuzzer, HonestCaller(served.plain) as honest:
        seen = attacks.attacked(served, fuzzer, honest, range(REQUESTS), tmp_path)

    assert seen["faults"] == []
    assert seen["same_score"]
    assert honest.failures == []
    assert {*attacks.ATTACKS, "fuzz"} <= set(honest.waits)
    assert sum(fuzzer.answers.values()) == REQUESTS
    assert {answer.split()[0] for answer in fuzzer.answers} == fuzzer.endpoint_names
