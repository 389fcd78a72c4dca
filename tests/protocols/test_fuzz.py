"""A sample of what `soak/fuzz.py` does in great numbers."""

from __future__ import annotations

import pytest
from protocols.conftest import ROOT

from testkit.served import Pair

REQUESTS = 400


def test_no_request_makes_the_server_fail(served: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from soak.fuzz import Fuzzer

    with Fuzzer(served, seed=1) as fuzzer:
        fuzzer.knock(range(REQUESTS))

    assert fuzzer.faults == []
    assert sum(fuzzer.answers.values()) == REQUESTS
    assert {answer.split()[0] for answer in fuzzer.answers} == fuzzer.endpoint_names


def test_memory_that_grows_is_told_from_memory_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from soak.fuzz import has_grown

    filling_up = [500.0, 580.0, 600.0, 603.0]
    assert not has_grown([*filling_up, *[604.0] * 16])
    assert has_grown([*filling_up, *(604.0 + 10 * look for look in range(16))])
