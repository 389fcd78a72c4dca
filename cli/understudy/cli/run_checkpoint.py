"""Options that choose a checkpoint of a run on disk, and the workers that compute with it, without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from understudy.checkpoints.temporary_folders import TemporaryFolder
from understudy.cli.values import LocalPath

if TYPE_CHECKING:
    from understudy.evaluator.model.export import CheckpointExporter
    from understudy.evaluator.sharding.evaluate import MakePool
    from understudy.evaluator.sharding.work import ModelSource

Command = Callable[..., Any]


def _folder(flag: str, help_text: str) -> Callable[[Command], Command]:
    return click.option(flag, type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help=help_text)


_OPTIONS = (
    _folder("--run-dir", "The run folder whose checkpoints are used, without a server, or its URL."),
    _folder(
        "--checkpoints",
        "Instead of --run-dir, a folder of checkpoints of which `understudy serve --checkpoints` has made copies.",
    ),
    click.option(
        "--state-dir",
        type=LocalPath(file_okay=False, path_type=Path),
        metavar="DIR",
        help="The evaluator's state folder, if not the default.",
    ),
    click.option(
        "--experiment", metavar="EXPERIMENT", help="Builds the model of weights-only checkpoints, as for serve."
    ),
    click.option(
        "--allow-unsafe-models",
        is_flag=True,
        help="Accept models that name any class, function or operation, as for serve.",
    ),
    click.option(
        "--require-signature",
        multiple=True,
        type=LocalPath(path_type=Path),
        metavar="FILE",
        help="Accept only a checkpoint that is signed with the private key of this public key, as for serve.",
    ),
    click.option("--run-name", metavar="NAME", help="The name of the run for which it is signed, as for serve."),
)

_NAMES = ("run_dir", "checkpoints", "state_dir", "experiment", "allow_unsafe_models", "require_signature", "run_name")


@dataclass(frozen=True, kw_only=True)
class RunCheckpoints:
    """Which checkpoints of which run may be used; see the help of the options."""

    run_dir: Path | None
    checkpoints: Path | None
    state_dir: Path | None
    experiment: str | None
    allow_unsafe_models: bool
    require_signature: tuple[Path, ...]
    run_name: str | None

    @property
    def is_given(self) -> bool:
        """Whether a folder is named."""
        return self.run_dir is not None or self.checkpoints is not None

    def exporter(self) -> CheckpointExporter:
        """Return the checkpoints.

        Raises:
            click.UsageError: No folder, or both, are named, or the folder does not exist.
            Exception: The experiment cannot be loaded, or the state folder cannot be found.
        """
        from understudy.checkpoints.signing import accepted_keys
        from understudy.evaluator.model.export import CheckpointExporter
        from understudy.experiments import load_experiment
        from understudy.service.service_errors import SettingsError
        from understudy.service.settings import ServeSettings

        try:
            settings = ServeSettings(run_dir=self.run_dir, checkpoints=self.checkpoints, state_dir=self.state_dir)
        except SettingsError as error:
            raise click.UsageError(str(error)) from error
        folder, state = settings.location.folder, settings.evaluator_state_dir
        if settings.location.url is None and not folder.is_dir() and not state.is_dir():
            flag, what = ("--run-dir", "run") if self.run_dir is not None else ("--checkpoints", "checkpoints")
            raise click.BadParameter(
                f"there is no folder {str(folder)!r}; give the folder of the {what}", param_hint=f"'{flag}'"
            )
        return CheckpointExporter(
            run_dir=None if settings.location.url is not None else self.run_dir,
            run_url=settings.location.url if settings.location.is_run else None,
            state_dir=settings.evaluator_state_dir,
            build_model=None if self.experiment is None else load_experiment(self.experiment).build_model,
            allow_unsafe_models=self.allow_unsafe_models,
            accepted=accepted_keys(self.require_signature, run=self.run_name, folder=settings.location.folder),
        )

    @contextmanager
    def opened(self, version: object) -> Iterator[tuple[int, ModelSource]]:
        """Yield the step and a private, verified copy of a version.

        Args:
            version: A step, ``latest`` or ``best``; None for the best.
        """
        from understudy.evaluator.sharding.work import ModelSource

        if version == "serving":
            raise click.BadParameter(
                "there is no serving version without a server; give latest, best or a step", param_hint="'--version'"
            )
        exporter = self.exporter()
        chosen: int | Literal["best", "latest"] = version if isinstance(version, int) else "best"
        step = exporter.resolve("latest" if version == "latest" else chosen)
        with (
            TemporaryFolder() as folder,
            exporter.local_checkpoint(step, folder.path) as local,
        ):
            source = ModelSource(
                folder=local.directory,
                digest=local.digest,
                experiment=self.experiment,
                allow_unsafe_models=self.allow_unsafe_models,
            )
            yield step, source


def checkpoint_options(command: Command) -> Command:
    """Give a command the options of `RunCheckpoints`, and its value as ``run``."""

    def with_run(**given: Any) -> Any:
        run = RunCheckpoints(**{name: given.pop(name) for name in _NAMES})
        return command(**given, run=run)

    with_run.__doc__ = command.__doc__
    with_run.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    for option in reversed(_OPTIONS):
        with_run = option(with_run)
    return with_run


_workers_option = click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="With --run-dir, how many processes of this machine compute, 1 by default; with --cluster, the most nodes.",
)

_cluster_option = click.option(
    "--cluster",
    metavar="ADDRESS",
    help="With --run-dir, compute on all nodes of a Ray cluster, HOST:PORT, or auto for the one that this machine is "
    "part of. It must have a token.",
)


def workers_options(command: Command) -> Command:
    """Give a command ``--workers`` and ``--cluster``."""
    return _workers_option(_cluster_option(command))


def pool_maker(workers: int | None, cluster: str | None) -> MakePool:
    """Return what makes a pool of processes on this machine, or on a cluster."""
    if cluster is not None:
        from understudy.evaluator.sharding.cluster_pool import ClusterPool

        return lambda work: ClusterPool(work, address=cluster, workers=workers)
    from understudy.evaluator.sharding.local_pool import LocalPool

    return lambda work: LocalPool(work, workers=workers or 1)


def files_for_server(files: tuple[Path | str, ...], workers: int | None, cluster: str | None) -> list[Path]:
    """Return the file that a server is sent, if any. Raise click.UsageError for what only goes with --run-dir."""
    local = [file for file in files if isinstance(file, Path)]
    if len(local) < len(files):
        raise click.UsageError("URLs go with --run-dir; a server is sent a file of this machine.")
    if len(local) > 1 or any(file.is_dir() for file in local):
        raise click.UsageError("Several FILES and folders go with --run-dir; a server is sent one file.")
    if workers is not None or cluster is not None:
        raise click.UsageError("--workers and --cluster go with --run-dir; a server has devices of its own.")
    return local
