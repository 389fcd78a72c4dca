"""The entry point. Each command's module is imported on first use."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
from typing import Final

import click

from understudy.cli.command_errors import INTERRUPTED, CommandError, missing_extras_reported
from understudy.cli.signals import hangup_as_sigterm, let_ending_signals_through, sigterm_held_back

_COMMANDS: Final = {
    "train": "Train an experiment and publish its checkpoints.",
    "publish": "Copy a run's checkpoints to a bucket as they are committed.",
    "serve": "Pick up, score and serve the checkpoints of a run.",
    "run": "Do what the cluster assigns to this task: train, or score and serve.",
    "demo": "Train, evaluate and serve on this machine.",
    "predict": "Send examples from a file to a server and show the model's outputs.",
    "evaluate": "Score a version on a file, or on a dataset of the server.",
    "rescore": "Score checkpoints again after a dataset, metric or slice has changed.",
    "compare": "Score versions on the same examples, with intervals for the differences.",
    "replay": "Send logged requests to another version and compare its answers.",
    "drift": "Say how far the distributions of data are from those of a reference.",
    "status": "Show the versions of a server and their latest evaluations.",
    "top": "Show what a server does, refreshed until interrupted.",
    "evaluations": "Show or export a server's record of every checkpoint.",
    "report": "Write a page with the curves, confusions and hard examples of a version.",
    "events": "Show events that are not delivered, send them again or drop them.",
    "examples": "List or export the hardest examples, or those that changed between two versions.",
    "watch": "Follow evaluations as they are recorded.",
    "tune": "Search the settings under which a server answers most.",
    "export": "Export a checkpoint from a run, as a Keras file or a SavedModel.",
    "keygen": "Make a key pair for signed checkpoints.",
    "sign": "Sign checkpoints that are written completely.",
    "promote": "Pin a version, remove the pin, or roll back.",
    "token": "Make a token for a caller of a server.",
    "health": "Check whether a server is serving; the exit status is the answer.",
}

_TRAINING: Final = ("train", "run")
"""These may join a cluster, which is safe from a lost SIGTERM only if none of their threads handles it."""

_LOGGING: Final = ("train", "serve", "run", "demo")
"""These show TensorFlow's warnings and errors, such as why it skips a GPU; the others only its errors."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_THIS_MACHINE: Final = ("localhost", "127.0.0.1", "::1")


class LazyGroup(click.Group):
    """A group that has its commands' names and one-line helps, and imports ``understudy.cli.<name>`` on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; report the extra to install if it needs one."""
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        _choose_backend()
        _bypass_proxies_to_this_machine()
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1" if cmd_name in _LOGGING else "2")
        with missing_extras_reported():
            module = importlib.import_module(f"understudy.cli.{cmd_name}")
        command = module.command
        if not isinstance(command, click.Command):
            raise TypeError(f"understudy.cli.{cmd_name}.command is a {type(command).__name__}, not a click.Command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is to run, or suggest similar names."""
        name = args[0]
        if name in _TRAINING:
            # Before numpy, which starts threads. Not where a settings file is read, for which all commands are loaded.
            ctx.with_resource(sigterm_held_back())
        if name in _COMMANDS or name.startswith("-"):
            return super().resolve_command(ctx, args)
        close = difflib.get_close_matches(name, _COMMANDS)
        hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else f"There are {', '.join(_COMMANDS)}."
        raise click.UsageError(f"No such command {name!r}. {hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing any."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; report the extra to install if it needs one, a full disk, and that it was interrupted."""
        let_ending_signals_through()
        try:
            with hangup_as_sigterm(), missing_extras_reported():
                return super().invoke(ctx)
        except click.UsageError as error:
            if not (remedy := _remedy(error)):
                raise
            raise click.UsageError(f"{error.message}. {remedy}", error.ctx) from error
        except OSError as error:
            if error.errno not in _FULL or error.filename is not None:
                raise
            raise CommandError(f"the output cannot be written: {error.strerror}") from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None


def _remedy(error: click.UsageError) -> str:
    """Return what to do about an argument that a command does not take; empty for other errors."""
    is_extra = error.message.startswith("Got unexpected extra argument")
    takes_target = error.ctx is not None and any("--target" in each.opts for each in error.ctx.command.params)
    return "The address of a server is given by --target" if is_extra and takes_target else ""


def _choose_backend() -> None:
    """Have Keras use TensorFlow, also where the user's environment or settings of Keras say otherwise."""
    chosen = os.environ.get("KERAS_BACKEND", "tensorflow")
    if chosen != "tensorflow":
        click.echo(f"KERAS_BACKEND={chosen} does not count here: all models run on TensorFlow", err=True)
    os.environ["KERAS_BACKEND"] = "tensorflow"


def _bypass_proxies_to_this_machine() -> None:
    """Have gRPC and HTTP, here and in the processes that are started, reach this machine without the user's proxy."""
    excepted = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if excepted != "*":
        os.environ["no_proxy"] = ",".join(filter(None, dict.fromkeys([*excepted.split(","), *_THIS_MACHINE])))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="understudy", prog_name="understudy")
def main() -> None:
    """Score and serve every checkpoint of a TensorFlow training job, and request predictions and evaluations."""
