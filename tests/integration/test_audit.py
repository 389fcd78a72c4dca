"""Who may change what a server does, and what the audit log says about it, over the wire."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import structlog
from integration.conftest import Run

from testkit.checkpoints import OUTPUTS, Chief, ones
from testkit.front_ends import FRONT_ENDS, GRPCIO
from testkit.hostile_connections import FORGED_ADDRESS
from testkit.in_process import until
from understudy.clients import NotFoundError, PermissionDeniedError
from understudy.v1 import model_pb2, model_pb2_grpc

pytestmark = pytest.mark.long

SETTINGS: Mapping[str, Any] = {"log_level": "error", "log_format": "json"}
EVENTS = ("serving version requested", "gate decided", "caller refused")
AUDIT = '"understudy.audit"'
SECONDS = 30.0

AuditLines = Callable[[], list[dict[str, Any]]]


@pytest.fixture(params=FRONT_ENDS)
def front_end(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def audit_lines(capfd: pytest.CaptureFixture[str]) -> Iterator[AuditLines]:
    """Return the audit lines so far, of a server in this process or in another."""
    written: list[str] = []
    with structlog.testing.capture_logs() as here:

        def so_far() -> list[dict[str, Any]]:
            written.append(capfd.readouterr().err)
            there = [line for line in "".join(written).splitlines() if line.startswith("{") and AUDIT in line]
            return [dict(line) for line in here if line["event"] in EVENTS] + [json.loads(line) for line in there]

        yield so_far


def test_decisions_are_audited_at_every_log_level(
    run_service: Run, chief: Chief, dataset_file: Path, audit_lines: AuditLines
) -> None:
    chief.publish(20)
    chief.publish(30)
    service = run_service({**SETTINGS, "eval_data": {"test": dataset_file}}, {"min_improvement": 0.0})
    service.wait_ready()
    client = service.client(metadata=tuple(FORGED_ADDRESS.items()))
    until(lambda: client.status().serving_step == 30)
    client.promote(20)
    client.roll_back()
    client.unpin()
    with pytest.raises(NotFoundError):
        client.promote(77)

    until(lambda: len(audit_lines()) >= 6)
    gate = {line["step"]: line for line in audit_lines() if line["event"] == "gate decided"}
    assert {step: line["outcome"] for step, line in gate.items()} == {20: "accepted", 30: "accepted"}
    assert "better than" in gate[30]["message"]
    changes = [line for line in audit_lines() if line["event"] == "serving version requested"]
    said = [(line["action"], line["version"], line["outcome"], line.get("serving_step")) for line in changes]
    assert said == [
        ("pin", "step: 20", "OK", 20),
        ("roll_back", "", "OK", 30),
        ("unpin", "", "OK", 30),
        ("pin", "step: 77", "NOT_FOUND", None),
    ]
    for line in changes:
        assert line["method"] == "/understudy.v1.ModelService/Promote"
        assert "127.0.0.1:" in line["peer"]
        assert line["request_id"]


@pytest.mark.parametrize("front_end", [GRPCIO])
def test_a_read_only_server_refuses_every_change_and_still_evaluates(
    run_service: Run, chief: Chief, dataset_file: Path, audit_lines: AuditLines
) -> None:
    chief.publish(10)
    chief.publish(30)
    settings = {**SETTINGS, "eval_data": {"test": dataset_file}, "read_only": True}
    service = run_service(settings, {"evaluation_policy": "latest"})
    service.wait_ready()
    client = service.client()
    until(lambda: len(list(client.list_evaluations())) == 2)
    entries, serving = list(client.list_evaluations()), client.status().serving_step

    with grpc.insecure_channel(service.grpc) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        for number, action in enumerate(model_pb2.PromoteAction.values()):
            request = model_pb2.PromoteRequest(action=action)
            with pytest.raises(grpc.RpcError, match="read-only") as refused:
                stub.Promote(request, timeout=SECONDS, metadata=(("x-request-id", f"change-{number}"),))
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(PermissionDeniedError, match="--read-only"):
        client.promote(10)

    batches = [(ones(4), np.ones((4, OUTPUTS), np.float32))]
    assert client.evaluate(batches, version=10).step == 10
    scored = client.evaluate_dataset("test", version=10)
    assert (scored.step, scored.sequence, scored.outcome) == (10, 0, "scored")
    assert scored.metrics["loss"] > 0
    assert client.compare(versions=[10, 30], dataset="test").versions[0].score.step == 10
    assert (list(client.list_evaluations()), client.status().serving_step) == (entries, serving)

    until(lambda: len(audit_lines()) >= 5)
    refusals = [line for line in audit_lines() if line["event"] == "caller refused"]
    assert [line["request_id"] for line in refusals][:4] == [f"change-{number}" for number in range(4)]
    assert {line["outcome"] for line in refusals} == {"PERMISSION_DENIED"}
    assert all("127.0.0.1:" in line["peer"] for line in refusals)
