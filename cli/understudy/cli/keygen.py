"""``understudy keygen``."""

from __future__ import annotations

from pathlib import Path

import click

from understudy.checkpoints.checkpoint_errors import KeyFileError
from understudy.checkpoints.signing import public_file, write_key_pair
from understudy.cli.command_errors import reported
from understudy.cli.values import LocalPath


@click.command("keygen")
@click.argument("file", type=LocalPath(dir_okay=False, path_type=Path))
def command(file: Path) -> None:
    """Make a key pair for signed checkpoints: FILE, which only you may read, and FILE.pub.

    \b
    understudy keygen trainer.key
    understudy train digits --run-dir RUN --steps 400 --sign-key trainer.key
    understudy serve --run-dir RUN --require-signature trainer.key.pub

    The keys are Ed25519 keys in PEM format, as OpenSSL writes them. An existing file is never overwritten.
    """  # noqa: D301 - click needs this character, which keeps the line breaks below it
    with reported(KeyFileError):
        identifier = write_key_pair(file)
    click.echo(f"private key: {file}\npublic key: {public_file(file)}\nidentifier: {identifier}")
