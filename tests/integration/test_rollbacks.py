"""Rollbacks of a whole server, by the client and the command, also after a restart."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from integration.conftest import STEPS

from testkit.checkpoints import Chief, ones
from testkit.in_process import RunningService, running_service, until
from understudy.cli.main import main
from understudy.clients import Client, FailedPreconditionError

pytestmark = pytest.mark.long


def roll_back_by_command(target: str) -> Any:
    result = CliRunner().invoke(main, ["promote", "--roll-back", "--json", "--target", target])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])  # after the lines that the server logs


def serve_each(chief: Chief, client: Client) -> None:
    for step in STEPS:
        chief.publish(step)
        until(lambda step=step: client.status().serving_step == step)  # type: ignore[misc]


def test_each_rollback_goes_further_back_also_after_a_restart(
    chief: Chief, replicas: tuple[str, ...], tmp_path: Path
) -> None:
    def start(stack: ExitStack) -> RunningService:
        settings = {"run_dir": tmp_path / "run"}
        running = running_service(settings, {}, replicas=replicas, state_dir=tmp_path / "state")
        return stack.enter_context(running)

    with ExitStack() as stack:
        service = start(stack)
        serve_each(chief, service.client())
        assert service.client().roll_back().serving_step == 20
    with ExitStack() as stack:
        service = start(stack)
        assert service.wait_ready() == 20
        back = roll_back_by_command(service.grpc)
        assert back == {"serving_step": 10, "previous_step": 20, "pinned_step": 10}
        assert service.client().predict({"x": ones(1)}).step == 10
        with pytest.raises(FailedPreconditionError, match="before step 10; pin one of the steps 20, 30"):
            service.client().roll_back()
        assert service.client().status().pinned_step == 10
        page = httpx.get(f"http://{service.http}/acts/roll-back")
        assert page.status_code == 404
        assert "no version that may serve again is known to have served before; pin a step instead" in page.text
