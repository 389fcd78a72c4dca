"""The file that says where the service listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.service.addresses import write_address_file
from understudy.service.service_errors import SettingsError


def test_the_addresses_are_written_whole_over_those_of_an_earlier_process(tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_text("grpc=127.0.0.1:1 http=127.0.0.1:2\n", encoding="ascii")

    write_address_file(file, "grpc=0.0.0.0:9500 http=0.0.0.0:9501")

    assert file.read_text(encoding="ascii") == "grpc=0.0.0.0:9500 http=0.0.0.0:9501\n"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"address_file .*none/address cannot be written .*No such file"):
        write_address_file(tmp_path / "none" / "address", "grpc=127.0.0.1:1 http=127.0.0.1:2")
