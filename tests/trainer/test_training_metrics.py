"""The port of a training's metrics, and callers that mean it no good."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack

import httpx
import pytest

from testkit.ports import IPV6_LOOPBACK, free_ports
from understudy.trainer.training_metrics import MAX_CONNECTIONS, TrainingMetrics

SECONDS = 30


@pytest.mark.parametrize("host", ["127.0.0.1", IPV6_LOOPBACK, "localhost"])
def test_silent_connections_take_neither_the_files_of_the_training_nor_the_place_of_a_scrape(host: str) -> None:
    (port,) = free_ports(1)
    before = threading.active_count()
    url = f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"
    metrics = TrainingMetrics(port, host=host, first_step=0, global_batch_size=1, restarts=0)
    with metrics, ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, port), SECONDS)) for _ in range(4 * MAX_CONNECTIONS)
        ]
        assert "understudy_train_steps_total 0.0" in httpx.get(url, timeout=SECONDS).text
        assert silent[0].recv(1) == b""
        assert threading.active_count() <= before + 1 + 2 * MAX_CONNECTIONS


def test_what_is_no_request_is_refused_without_a_word_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    with TrainingMetrics(port, first_step=0, global_batch_size=1, restarts=0):
        for content in (b"\x16\x03\x01 nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n"):
            with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(65536)
    assert capfd.readouterr().err == ""
