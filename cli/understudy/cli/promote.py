"""``understudy promote``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from understudy.cli.connection import ConnectionSettings, VersionType, connected, json_option
from understudy.cli.options import settings_options
from understudy.cli.output import print_json

if TYPE_CHECKING:
    from understudy.clients import Client, Promotion, Version


@click.command("promote")
@click.option("--pin", type=VersionType(), help="Serve this version, loaded on demand, until --unpin.")
@click.option("--unpin", is_flag=True, help="Follow the server's own policy again.")
@click.option(
    "--roll-back",
    is_flag=True,
    help="Serve and pin the version that was serving before the present one; during a rollout, the one that the others "
    "serve. Again, it goes further back.",
)
@json_option("Print one JSON object: serving_step, previous_step, pinned_step.")
@settings_options(settings=ConnectionSettings)
def command(
    *,
    pin: Version | None,
    unpin: bool,
    roll_back: bool,
    as_json: bool,
    settings: ConnectionSettings,
) -> None:
    """Decide which version a server serves. The decision outlives restarts of the server."""
    if (pin is not None) + unpin + roll_back != 1:
        raise click.UsageError("Give exactly one of --pin, --unpin and --roll-back.")
    with connected(settings) as client:
        promotion = _decided(client, pin, unpin=unpin)
    if as_json:
        print_json(dataclasses.asdict(promotion))
    else:
        is_new = promotion.previous_step not in {None, promotion.serving_step}
        before = f", before it step {promotion.previous_step}" if is_new else ""
        pinned = "nothing is pinned" if promotion.pinned_step is None else f"step {promotion.pinned_step} is pinned"
        click.echo(f"serving: step {promotion.serving_step}{before}; {pinned}")


def _decided(client: Client, pin: Version | None, *, unpin: bool) -> Promotion:
    if pin is not None:
        return client.promote(pin)
    return client.unpin() if unpin else client.roll_back()
