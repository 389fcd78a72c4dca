"""``understudy sign``."""

from __future__ import annotations

from pathlib import Path

import click

from understudy.checkpoints.checkpoint_errors import CheckpointError
from understudy.checkpoints.detached import sign_checkpoint
from understudy.checkpoints.signing import SigningKey
from understudy.cli.command_errors import CommandError, reported
from understudy.cli.values import LocalPath


@click.command("sign")
@click.argument("paths", nargs=-1, required=True, type=LocalPath(path_type=Path), metavar="PATH...")
@click.option(
    "--sign-key",
    required=True,
    type=LocalPath(dir_okay=False, path_type=Path),
    envvar="UNDERSTUDY_SIGN_KEY",
    metavar="FILE",
    help="The private key; see understudy keygen.",
)
@click.option(
    "--run-name",
    envvar="UNDERSTUDY_RUN_NAME",
    metavar="NAME",
    help="The name of the run to sign for; by default that of the run folder, or of the folder that holds PATH.",
)
def command(paths: tuple[Path, ...], sign_key: Path, run_name: str | None) -> None:
    """Sign checkpoints that are written completely, such as those of another program.

    \b
    understudy sign models/model-0100.keras --sign-key trainer.key
    understudy sign RUN/checkpoints/000000000400 --sign-key trainer.key

    PATH is a folder of a run's checkpoint, a .keras or .h5 file, a SavedModel's folder, or the prefix of the files of
    tf.train. The signature is written beside it as PATH.sig, or inside a folder.
    """  # noqa: D301 - click needs this character, which keeps the line breaks below it
    with reported(CheckpointError):
        key = SigningKey.read(sign_key)
        for path in paths:
            try:
                written = sign_checkpoint(path, key, run=run_name)
            except OSError as error:
                raise CommandError(f"{path} cannot be signed: {error}") from error
            click.echo(f"{path} is signed: {written}")
