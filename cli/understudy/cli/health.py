"""``understudy health``, which the container image uses as its health check."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Final

import click
from click.core import ParameterSource

from understudy.cli.command_errors import CommandError
from understudy.cli.connection import ConnectionSettings, connected
from understudy.cli.options import settings_options

_PATIENCE_SECONDS: Final = 5.0

_ADDRESS: Final = re.compile(r"grpc=(.*):(\d+) http=.*\n")
_ANY_HOST: Final = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}  # noqa: S104 - a server's listen address
"""The address for calls to a server that listens on every address."""


@click.command("health")
@click.option("--service", default="", metavar="NAME", help="One service, such as understudy.v1.PredictionService.")
@click.option(
    "--address-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    envvar="UNDERSTUDY_ADDRESS_FILE",
    help="Ask the server that wrote this file (`understudy serve --address-file`), unless --target is given.",
)
@settings_options(settings=ConnectionSettings)
@click.pass_context
def command(context: click.Context, *, service: str, address_file: Path | None, settings: ConnectionSettings) -> None:
    """Check whether a server is serving; the exit status is the answer.

    Waits 5 seconds for it unless --timeout-seconds says otherwise.
    """
    if address_file is not None and context.get_parameter_source("target") is ParameterSource.DEFAULT:
        settings = dataclasses.replace(settings, target=(_read_target(address_file),))
    if settings.timeout_seconds is None:
        settings = dataclasses.replace(settings, timeout_seconds=_PATIENCE_SECONDS)
    with connected(settings) as client:
        serving = client.is_serving(service)
    click.echo("SERVING" if serving else "NOT_SERVING")
    if not serving:
        raise click.exceptions.Exit(1)


def _read_target(file: Path) -> str:
    """Return the server's gRPC address from its address file."""
    try:
        found = _ADDRESS.fullmatch(file.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"the server does not listen yet, or writes no address file: {error}") from error
    if found is None:
        raise CommandError(f"{file} is no address file; expected grpc=HOST:PORT http=HOST:PORT")
    return f"{_ANY_HOST.get(found[1], found[1])}:{found[2]}"
