"""A whole service posts what happens to checkpoints."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.conftest import Run

from testkit.checkpoints import WIDTH, Chief
from testkit.fleet import evaluator_process
from testkit.in_process import WAIT_SECONDS, until
from testkit.webhook_receiver import SECRET, Receiver, receiving
from understudy.clients import Client
from understudy.service.events.webhook_settings import destination_name


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    return file


def settings_for(receivers: list[Receiver], secret_file: Path, dataset_file: Path) -> dict[str, Any]:
    return {
        "webhook": tuple(receiver.url for receiver in receivers),
        "webhook_secret_file": secret_file,
        "eval_data": {"test": dataset_file},
        "model_name": "digits",
    }


def test_the_life_of_a_checkpoint_is_posted_beside_a_webhook_that_hangs(
    run_service: Run, chief: Chief, dataset_file: Path, secret_file: Path
) -> None:
    with receiving() as receiver, receiving() as hanging:
        hanging.always = hanging.hang
        chief.publish(10)
        service = run_service(settings_for([receiver, hanging], secret_file, dataset_file))
        service.wait_ready()

        events = receiver.events(3)
        assert events[0] == ("committed", "10")
        assert sorted(events[1:]) == [("promoted", "10"), ("scored", "10")]
        (scored,) = (each.verified() for each in receiver.received if b".scored" in each.body)
        assert scored.get_source() == "/understudy/digits"
        data: Any = scored.get_data()
        assert data["dataset"] == "test"
        assert data["examples"] > 0
        assert set(data["metrics"]) >= {"loss"}

        hanging.wait_for(1)
        began = time.monotonic()
        for _ in range(20):
            service.client().predict(np.ones((1, WIDTH), np.float32))
        assert time.monotonic() - began < 10
        chief.publish(20)
        assert receiver.events(6)[3] == ("committed", "20")
        service.client().promote(10)
        assert receiver.events(7)[6] == ("rolled_back", "10")

        waits = destination_name(hanging.url)
        assert service.metric("understudy_events_waiting", destination=waits) == 7
        sent = destination_name(receiver.url)
        until(lambda: service.metric("understudy_events_sent_total", destination=sent) == 7)


def test_a_restarted_service_posts_what_was_left_and_nothing_twice(
    run_service: Run, chief: Chief, dataset_file: Path, secret_file: Path
) -> None:
    with receiving() as receiver:
        settings = settings_for([receiver], secret_file, dataset_file)
        receiver.always = receiver.hang
        chief.publish(10)
        service = run_service(settings)
        service.wait_ready()
        unanswered = receiver.wait_for(1)
        receiver.always = None
        receiver.released.set()
        service.start_stopping()
        service.join()

        chief.publish(20)
        run_service(settings).wait_ready()
        until(lambda: {("committed", "20"), ("promoted", "20")} <= set(receiver.events(1)))
        ids = [each.id for each in receiver.received]
        assert ids[0] == unanswered[0].id
        assert len({*ids}) == len({(each.id, each.body) for each in receiver.received})
        assert receiver.events(1).count(("promoted", "10")) <= 1


_STUCK = """
import atexit
import threading
from pathlib import Path

from understudy.service.events import deliveries

deliveries._LONGEST_CALL_SECONDS = 0.2
atexit.register(threading.Event().wait)  # as those of libraries do whose server does not answer


class Stuck:
    def __init__(self, context):
        Path(__file__).with_suffix(".began").touch()
        threading.Event().wait()
"""


def test_a_service_ends_although_an_exporter_does_not_return_and_keeps_its_library_from_ending(
    chief: Chief, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stuck.py").write_text(_STUCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    chief.publish(10)
    with evaluator_process(tmp_path, 0, "--exporter=stuck:Stuck") as (process, address):
        with Client(address) as client:
            until(lambda: client.status(wait_for_ready=True).serving_step == 10)
        until((tmp_path / "stuck.began").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0
