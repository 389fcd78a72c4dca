"""``understudy health``, which the container image uses as its health check."""

from __future__ import annotations

import dataclasses
import http.client
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
from click.core import ParameterSource

from understudy.cli.command_errors import CommandError
from understudy.cli.connection import ConnectionSettings, connected
from understudy.cli.options import settings_options
from understudy.cli.values import LocalPath

_PATIENCE_SECONDS: Final = 5.0

_ADDRESSES: Final = re.compile(r"grpc=(.*):(\d+) http=(.*):(\d+)( tls)?\n")
_ANY_HOST: Final = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}  # noqa: S104 - a server's listen address
"""The address for calls to a server that listens on every address."""


@click.command("health")
@click.option("--service", default="", metavar="NAME", help="One service, such as understudy.v1.PredictionService.")
@click.option(
    "--address-file",
    type=LocalPath(dir_okay=False, path_type=Path),
    metavar="FILE",
    envvar="UNDERSTUDY_ADDRESS_FILE",
    help="Ask the server that wrote this file (`understudy serve --address-file`), unless --target is given.",
)
@settings_options(settings=ConnectionSettings)
@click.pass_context
def command(context: click.Context, *, service: str, address_file: Path | None, settings: ConnectionSettings) -> None:
    """Check whether a server is serving; the exit status is the answer.

    Waits 5 seconds for it unless --timeout-seconds says otherwise. Without --tls-ca, a server with TLS that wrote the
    address file is asked over HTTPS, at /readyz, which needs no certificate; it is on this machine, and its certificate
    is not verified.
    """
    patience = settings.timeout_seconds or _PATIENCE_SECONDS
    settings = dataclasses.replace(settings, timeout_seconds=patience)
    server = None
    if address_file is not None and context.get_parameter_source("target") is ParameterSource.DEFAULT:
        server = _read_addresses(address_file)
        settings = dataclasses.replace(settings, target=(server.grpc,))
    if server is not None and server.tls and settings.tls_ca is None and not service:
        serving = _is_ready(server, patience)
    else:
        with connected(settings) as client:
            serving = client.is_serving(service)
    click.echo("SERVING" if serving else "NOT_SERVING")
    if not serving:
        raise click.exceptions.Exit(1)


@dataclass(frozen=True, kw_only=True)
class _Addresses:
    """The addresses of a server on this machine."""

    grpc: str
    http_host: str
    http_port: int
    tls: bool


def _read_addresses(file: Path) -> _Addresses:
    try:
        found = _ADDRESSES.fullmatch(file.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"the server does not listen yet, or writes no address file: {error}") from error
    if found is None:
        raise CommandError(f"{file} is no address file; expected grpc=HOST:PORT http=HOST:PORT")
    grpc_host, http_host = (_ANY_HOST.get(host, host) for host in found.group(1, 3))
    return _Addresses(
        grpc=f"{grpc_host}:{found[2]}", http_host=http_host, http_port=int(found[4]), tls=found[5] is not None
    )


def _is_ready(server: _Addresses, seconds: float) -> bool:
    """Ask ``/readyz`` over HTTPS, without verification."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(
        server.http_host.strip("[]"), server.http_port, timeout=seconds, context=context
    )
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(f"{server.http_host}:{server.http_port} does not answer over HTTPS: {error}") from error
    finally:
        connection.close()
