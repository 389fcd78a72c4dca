"""``understudy publish``."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from understudy.checkpoints.checkpoint_errors import CheckpointError
from understudy.checkpoints.layout import MANIFEST_FILE, RunDir
from understudy.cli.command_errors import CommandError, reported
from understudy.cli.values import LocalPath

_LOOK_SECONDS = 0.5


@click.command("publish")
@click.option(
    "--run-dir",
    required=True,
    type=LocalPath(file_okay=False, path_type=Path),
    envvar="UNDERSTUDY_RUN_DIR",
    metavar="RUN",
    help="The local run folder, which the trainer may be writing to.",
)
@click.option(
    "--to", "url", required=True, metavar="URL", help="The remote run folder, s3://BUCKET/PATH or gs://BUCKET/PATH."
)
@click.option(
    "--keep-checkpoints",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    metavar="N",
    help="How many of the newest checkpoints to keep there.",
)
def command(*, run_dir: Path, url: str, keep_checkpoints: int) -> None:
    """Copy a run's checkpoints to a bucket as they are committed, and how the training is going.

    \b
    understudy publish --run-dir RUN --to s3://bucket/run
    understudy serve --run-dir s3://bucket/run --experiment digits

    May start before the trainer, and writes nothing into RUN until that begins. Ends once training has finished and all
    is copied. On SIGTERM it copies what is committed by then. Start it again to go on. The region and the credentials
    of s3:// are AWS's usual settings, and AWS_ENDPOINT_URL names another store; those of gs:// are Google Cloud's.

    Exit status: 0 done; 1 failed, see stderr; 2 usage error.
    """  # noqa: D301 - click needs this character, which keeps the line breaks below it
    from understudy.checkpoints.remote.files import STORE_SCHEMES, open_store
    from understudy.checkpoints.remote.publisher import RemotePublisher

    if not url.startswith(STORE_SCHEMES):
        raise click.BadParameter(
            f"give s3://BUCKET/PATH or gs://BUCKET/PATH, not {url}. To other stores, copy the run folder with the "
            f"store's own tools, each checkpoint's {MANIFEST_FILE} last.",
            param_hint="'--to'",
        )
    logging.basicConfig(format="%(levelname)s %(message)s")
    logging.getLogger("understudy").setLevel(logging.INFO)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    run = RunDir(run_dir)
    with reported(CheckpointError), _as_failure(url):
        if not _has_begun(run, stopped):
            return
        publisher = RemotePublisher(
            run,
            open_store(url),
            keep=keep_checkpoints,
            on_published=lambda step: click.echo(f"step {step} is published to {url}"),
        )
        with publisher:
            publisher.claim_once_it_answers(stopped)
            publisher.follow(stopped)


def _has_begun(run: RunDir, stopped: threading.Event) -> bool:
    """Wait until a trainer has written into the run folder; return whether it did before a signal."""
    if not run.has_begun():
        lack = "holds neither training.json nor a checkpoint of a run" if run.root.is_dir() else "does not exist"
        click.echo(f"{run.root} {lack}; waiting until the trainer begins", err=True)
    while not (has_begun := run.has_begun()) and not stopped.wait(_LOOK_SECONDS):
        pass
    return has_begun


@contextmanager
def _as_failure(url: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"{error}; run it again to go on with what is not at {url} yet") from error
