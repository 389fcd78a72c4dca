"""``understudy token``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from understudy.cli.command_errors import CommandError
from understudy.cli.values import LocalPath
from understudy.service.callers.callers_file import hash_text, new_token
from understudy.service.calls.caller import Group


@click.command("token")
@click.argument("name")
@click.option(
    "--group",
    "groups",
    type=click.Choice([group.value for group in Group]),
    multiple=True,
    help="What the caller may do; may be repeated.",
)
@click.option(
    "--output",
    type=LocalPath(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The new file for the token, which only this user can read; NAME.token by default.",
)
def command(*, name: str, groups: tuple[str, ...], output: Path | None) -> None:
    """Make a token for the caller NAME, and print its entry in the file of `understudy serve --callers`.

    The token is written to a file, and the entry holds its hash. To replace a token, add the new hash to the caller's
    tokens, give the caller the new file, and remove the old hash.
    """
    if not (name.isprintable() and name) or '"' in name or "\\" in name:
        raise click.BadParameter("give printable characters without quotes and backslashes", param_hint="NAME")
    token = new_token()
    _write(output or Path(f"{name}.token"), token)
    shown = ", ".join(f'"{group}"' for group in groups)
    click.echo(f'[[callers]]\nname = "{name}"\ngroups = [{shown}]\ntokens = ["{hash_text(token)}"]\n')


def _write(file: Path, token: str) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise CommandError(f"{file} exists; give another one with --output, as a token may be in use") from error
    except OSError as error:
        raise CommandError(f"{file} cannot be written ({error.strerror}); give another one with --output") from error
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        opened.write(f"{token}\n")
