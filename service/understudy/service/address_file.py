"""Publishes the addresses of the service to other programs on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from understudy.service.service_errors import SettingsError


def write_address_file(file: Path, addresses: str) -> None:
    """Write ``grpc=HOST:PORT http=HOST:PORT`` and a newline; the write is atomic.

    Raises:
        SettingsError: The file cannot be written.
    """
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(f"{addresses}\n", encoding="ascii")
        unfinished.replace(file)
    except OSError as error:
        raise SettingsError(
            f"address_file {file} cannot be written ({error.strerror}); give a file in a folder that can be written to"
        ) from error
