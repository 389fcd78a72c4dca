"""TLS of the service's ports: certificates from files, which are read again when they change."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from understudy.service.refreshed_files import open_regular
from understudy.service.service_errors import SettingsError

_log = structlog.get_logger(__name__)

_Stamp = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """The files of the service's TLS, all PEM.

    Attributes:
        certificate: The service's certificate, followed by the intermediate ones.
        key: Its private key, unencrypted.
        client_ca: The certificates of the authorities that sign clients' certificates; None to accept every client.
        requires_client: Whether clients need a certificate if there are such authorities; else one is verified if the
            client has it.
    """

    certificate: Path
    key: Path
    client_ca: Path | None
    requires_client: bool = True

    def stamp(self) -> _Stamp:
        """Return a value that changes when a file is written, replaced or deleted."""
        return tuple(file_stamp(file) for file in (self.certificate, self.key, self.client_ca) if file is not None)


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """What the files held at one time.

    Attributes:
        certificate: The service's certificate chain, PEM.
        key: Its private key, PEM.
        client_ca: The authorities of clients' certificates, PEM; None to accept every client.
        requires_client: Whether clients need a certificate.
        context: The same for Python's own servers, TLS 1.2 or newer. It verifies a client's certificate if the client
            sends one.
    """

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    requires_client: bool
    context: ssl.SSLContext

    @classmethod
    def read(cls, files: TlsFiles) -> Certificates:
        """Read and check the files.

        Raises:
            SettingsError: A file cannot be read, is not PEM, or the key is that of another certificate.
        """
        certificate = _read("--tls-cert", files.certificate)
        key = _read("--tls-key", files.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A resumed session would skip the check of the client's certificate against the newest authorities.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        _check_certificates("--tls-cert", files.certificate, certificate)
        _load_pair(context, files)
        client_ca = None
        if files.client_ca is not None:
            client_ca = _read("--tls-client-ca", files.client_ca)
            _check_certificates("--tls-client-ca", files.client_ca, client_ca)
            context.load_verify_locations(cadata=_text(client_ca))
            context.verify_mode = ssl.CERT_OPTIONAL
        return cls(
            certificate=certificate,
            key=key,
            client_ca=client_ca,
            requires_client=client_ca is not None and files.requires_client,
            context=context,
        )


class ServerCertificates:
    """The certificates that new connections use. Thread-safe, but for `refresh`: one thread at a time.

    Args:
        files: Where they are. They may be replaced at any time, one after the other too.

    Raises:
        SettingsError: See `Certificates.read`.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = files.stamp()
        self._current = Certificates.read(files)
        self._is_current = True
        self._callbacks: list[Callable[[Certificates], None]] = []

    @property
    def current(self) -> Certificates:
        """The newest certificates that could be used; the same object until they change."""
        return self._current

    @property
    def is_current(self) -> bool:
        """Whether `current` is what the files hold; if not, that cannot be used."""
        return self._is_current

    def on_change(self, callback: Callable[[Certificates], None]) -> None:
        """Call a function after each change, on the thread that calls `refresh`."""
        self._callbacks.append(callback)

    def refresh(self) -> None:
        """Read the files again if they changed. Certificates that cannot be used are logged once, and change nothing.

        Raises:
            OSError: From a callback.
        """
        stamp = self._files.stamp()
        if stamp == self._stamp:
            return
        try:
            read = Certificates.read(self._files)
        except SettingsError as error:
            self._stamp, self._is_current = stamp, False
            _log.error("kept the old certificate, because the new one cannot be used", reason=str(error))
            return
        if self._files.stamp() != stamp:  # written meanwhile; the next call reads them
            return
        for callback in self._callbacks:
            callback(read)
        self._stamp, self._is_current, self._current = stamp, True, read
        _log.info("new connections use the new certificate", file=str(self._files.certificate))


@functools.lru_cache(maxsize=1024)
def certificate_names(certificate: bytes) -> tuple[str, ...]:
    """Return the names in a verified certificate: the alternative ones (URIs, then DNS names), then the common name.

    Args:
        certificate: The certificate, PEM.
    """
    from cryptography import x509

    try:
        read = x509.load_pem_x509_certificate(certificate)
        names = [str(common.value) for common in read.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
        alternative = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return tuple(names)
    except (ValueError, x509.DuplicateExtension):  # OpenSSL accepts more than this library
        return ()
    uris = alternative.get_values_for_type(x509.UniformResourceIdentifier)
    return tuple(dict.fromkeys([*uris, *alternative.get_values_for_type(x509.DNSName), *names]))


def file_stamp(file: Path) -> tuple[int, ...] | None:
    """Return a value that changes when a file is written, replaced or deleted."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(flag: str, file: Path) -> bytes:
    try:
        with open_regular(file) as opened:
            return opened.read()
    except OSError as error:
        raise SettingsError(
            f"{flag} {file} cannot be read ({error.strerror}); give a PEM file that this user can read"
        ) from error


def _text(content: bytes) -> str:
    """Return what PEM consists of; comments between certificates may have other characters."""
    return content.decode("ascii", errors="ignore")


def _check_certificates(flag: str, file: Path, content: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=_text(content))
    except (ssl.SSLError, ValueError) as error:
        raise SettingsError(f"{flag} {file} holds no certificate; give a PEM file with one or several") from error


def _load_pair(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        context.load_cert_chain(files.certificate, files.key, password="")  # an encrypted key fails, without a prompt
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            reason = f"is not the key of the certificate in {files.certificate}; give the two that belong together"
        else:
            reason = f"cannot be used ({error.reason}); give an unencrypted private key in PEM"
        raise SettingsError(f"--tls-key {files.key} {reason}") from error
    except OSError as error:
        raise SettingsError(
            f"--tls-key {files.key} or {files.certificate} cannot be read ({error.strerror})"
        ) from error
