"""Channel credentials from files."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import grpc

Role = Literal["ca", "cert", "key"]


class TlsFileError(ValueError):
    """A file cannot be used.

    Args:
        role: Which of the files.
        message: The file and the reason.
    """

    def __init__(self, role: Role, message: str) -> None:
        super().__init__(message)
        self.role = role


def read_credentials(ca: Path, certificate: Path | None, key: Path | None) -> grpc.ChannelCredentials:
    """Return the credentials of a channel with TLS.

    Args:
        ca: The authorities that sign the server's certificate, in PEM.
        certificate: The certificate to show to the server, in PEM; None for none.
        key: Its private key, unencrypted, in PEM; None without a certificate.

    Raises:
        TlsFileError: A file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with _named("ca", ca):
        context.load_verify_locations(ca)
        roots = ca.read_bytes()
    own: tuple[bytes | None, bytes | None] = (None, None)
    if certificate and key:
        with _named("cert", certificate):
            context.load_cert_chain(certificate, key, password="")  # an encrypted key fails, without a prompt
            own = (key.read_bytes(), certificate.read_bytes())
    return grpc.ssl_channel_credentials(roots, *own)


@contextmanager
def _named(role: Role, file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # SSLError is one, too
        reason = getattr(error, "reason", None) or error.strerror
        raise TlsFileError(role, f"{file} cannot be used: {reason}") from error
