from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from testkit.ports import IPV6_LOOPBACK
from understudy.service.addresses import host_and_port
from understudy.service.front_end import reserve, write_address_file
from understudy.service.service_errors import PortInUseError, SettingsError


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", IPV6_LOOPBACK])
def test_a_free_port_is_kept_from_others(host: str) -> None:
    with reserve(host, 0) as reserved:
        port = reserved.getsockname()[1]
        assert port != 0
        with pytest.raises(PortInUseError, match=f"{re.escape(host_and_port(host, port))}.*--grpc-port"):
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


def test_the_addresses_are_written_whole_over_those_of_an_earlier_process(tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_text("grpc=127.0.0.1:1 http=127.0.0.1:2\n", encoding="ascii")

    write_address_file(file, "grpc=0.0.0.0:9500 http=0.0.0.0:9501")

    assert file.read_text(encoding="ascii") == "grpc=0.0.0.0:9500 http=0.0.0.0:9501\n"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"address_file .*none/address cannot be written .*No such file"):
        write_address_file(tmp_path / "none" / "address", "grpc=127.0.0.1:1 http=127.0.0.1:2")
