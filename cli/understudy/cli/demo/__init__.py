"""The ``demo`` command: a whole training job on this machine."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click

from understudy.cli.demo.cluster import run_cluster_demo
from understudy.cli.demo.script import run_script_demo


@click.command(name="demo")
@click.option("--keep", is_flag=True, help="Leave the service running and its files in place afterwards.")
@click.option(
    "--script", is_flag=True, help="Train with a plain Keras script instead, which does not import Understudy."
)
@click.option("--open", "opens", is_flag=True, help="Open the service's page in the browser.")
def command(*, keep: bool, script: bool, opens: bool) -> None:
    """Train on two workers beside an evaluator that scores and serves every checkpoint.

    A job of two workers and an evaluator under one TF_CONFIG learns handwritten digits. Each checkpoint is picked up,
    scored and swapped in while predictions keep flowing. At the end the demo requests the test accuracy and the
    predictions for a few digits, which it draws. It exits with status 0 if all checks passed.
    """
    folder = Path(tempfile.mkdtemp(prefix="understudy-demo-"))
    (run_script_demo if script else run_cluster_demo)(folder, keep=keep, opens=opens)
    if not keep:
        shutil.rmtree(folder)
