"""A sample of what `soak/attacks.py` does in great numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from protocols.conftest import ROOT

from testkit.front_ends import FRONT_ENDS
from testkit.preloading import preloaded
from testkit.served import Pair, plain_model, publish, serving
from testkit.values import PLAIN, PLAIN_STEPS

pytestmark = pytest.mark.long

REQUESTS = 400


@pytest.fixture
def soak_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the modules of the soak importable."""
    monkeypatch.syspath_prepend(ROOT)


@pytest.mark.usefixtures("soak_modules")
def test_no_request_and_no_attack_makes_the_server_fail(
    served: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from soak import attacks, attacks_on_servers
    from soak.fuzz import Fuzzer
    from soak.honest_caller import HonestCaller

    for name in ("_ATTACK_SECONDS", "_FLOOD_SECONDS"):
        monkeypatch.setattr(attacks_on_servers, name, 0.4)
    for name, value in {"_ALONE_SECONDS": 0.05, "_SETTLE_SECONDS": 0.0, "ROUNDS": 1}.items():
        monkeypatch.setattr(attacks, name, value)
    with Fuzzer(served, seed=1) as fuzzer, HonestCaller(served.plain) as honest:
        seen = attacks.attacked(served, fuzzer, honest, range(REQUESTS), tmp_path)

    assert seen["faults"] == []
    assert seen["same_score"]
    assert honest.failures == []
    assert {*attacks_on_servers.ATTACKS, "fuzz"} <= set(honest.waits)
    assert sum(fuzzer.answers.values()) == REQUESTS
    assert {answer.split()[0] for answer in fuzzer.answers} == fuzzer.endpoint_names


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.usefixtures("soak_modules")
def test_no_version_is_held_back_or_stands_for_other_weights(front_end: str, tmp_path: Path) -> None:
    """On a server of its own, as other steps are serving afterwards."""
    from soak.attacks_on_versions import ATTACKS

    publish(tmp_path, {step: plain_model(step) for step in PLAIN_STEPS})
    with serving(tmp_path, PLAIN, "--frontend", front_end, environ=preloaded()) as served:
        assert [fault for attack in ATTACKS.values() for fault in attack(served)] == []
