"""Certificates in files, as an operator has them, and handshakes with them."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import trustme

SECONDS = 20.0


class Credentials:
    """A certificate, its key and the authority's certificate in a folder.

    Args:
        folder: Where the files are.
        authority: The authority that signs.
        names: The names in the certificate.
    """

    def __init__(self, folder: Path, authority: trustme.CA, *names: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.certificate, self.key, self.ca = folder / "tls.crt", folder / "tls.key", folder / "ca.crt"
        self._names = names
        replace(self.ca, authority.cert_pem.bytes())
        self.renew(authority)

    def renew(self, authority: trustme.CA) -> bytes:
        """Replace both files, one after the other; return the new certificate as in a handshake."""
        issued = authority.issue_cert(*self._names)
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        replace(self.key, issued.private_key_pem.bytes())
        replace(self.certificate, chain)
        return ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode("ascii"))

    def channel(self) -> grpc.ChannelCredentials:
        """Return the credentials of a channel that shows this certificate."""
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes())

    def context(self) -> ssl.SSLContext:
        """Return the context of a connection that shows this certificate."""
        context = ssl.create_default_context(cafile=self.ca)
        context.load_cert_chain(self.certificate, self.key)
        context.set_alpn_protocols(["h2", "http/1.1"])
        return context


def replace(file: Path, content: bytes) -> None:
    """Replace a file atomically."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_bytes(content)
    unfinished.replace(file)


def certificate_of(address: str, context: ssl.SSLContext) -> bytes:
    """Return the certificate that a server shows in a new handshake."""
    with handshake(address, context) as connection:
        shown = connection.getpeercert(binary_form=True)
    assert shown is not None
    return shown


@contextmanager
def handshake(address: str, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    """Connect to ``HOST:PORT``."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        yield connection
