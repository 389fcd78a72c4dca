from __future__ import annotations

import socket

import pytest

from understudy.service.addresses import reserve
from understudy.service.service_errors import PortInUseError


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_free_port_is_kept_from_others(host: str) -> None:
    with reserve(host, 0) as reserved:
        port = reserved.getsockname()[1]
        assert port != 0
        with pytest.raises(PortInUseError, match=f"{host}:{port}.*--grpc-port"):
            reserve(host, port)


def test_a_port_that_is_kept_can_be_listened_on_by_who_shares_it() -> None:
    with reserve("127.0.0.1", 0) as reserved, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(reserved.getsockname())
        listener.listen()
        with socket.create_connection(reserved.getsockname(), timeout=5):
            accepted, address = listener.accept()
            accepted.close()
            assert address[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_this_machines_is_refused(host: str) -> None:
    with pytest.raises(PortInUseError, match=host):
        reserve(host, 0)
