"""``understudy health``, which the container image uses as its health check."""

from __future__ import annotations

import dataclasses
from typing import Final

import click

from understudy.cli.connection import ConnectionSettings, connected
from understudy.cli.options import settings_options

_PATIENCE_SECONDS: Final = 5.0


@click.command("health")
@click.option("--service", default="", metavar="NAME", help="One service, such as understudy.v1.PredictionService.")
@settings_options(settings=ConnectionSettings)
def command(*, service: str, settings: ConnectionSettings) -> None:
    """Ask a server whether it serves; the exit status is the answer.

    Waits 5 seconds for it unless --timeout-seconds says otherwise.
    """
    if settings.timeout_seconds is None:
        settings = dataclasses.replace(settings, timeout_seconds=_PATIENCE_SECONDS)
    with connected(settings) as client:
        serving = client.is_serving(service)
    click.echo("SERVING" if serving else "NOT_SERVING")
    if not serving:
        raise click.exceptions.Exit(1)
