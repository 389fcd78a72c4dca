"""The ``demo`` command: the main job, on this machine, for people to watch."""

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
    "--script", is_flag=True, help="Train with a plain Keras script instead, which knows nothing of Understudy."
)
def command(*, keep: bool, script: bool) -> None:
    """Train on two workers beside an evaluator that scores and serves every checkpoint, and watch it happen.

    Real handwritten digits are learned by a job of two workers and an evaluator under one TF_CONFIG. Each checkpoint
    is picked up, scored and swapped in while predictions keep flowing. At the end the service is asked for the test
    accuracy and for a few digits, which are drawn. It ends by itself, with status 0 if all of it held.
    """
    folder = Path(tempfile.mkdtemp(prefix="understudy-demo-"))
    (run_script_demo if script else run_cluster_demo)(folder, keep=keep)
    if not keep:
        shutil.rmtree(folder)
