"""``understudy tune``: servers with the settings of a candidate, and the load on them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import click
import numpy as np

from understudy.checkpoints import RunDir
from understudy.checkpoints.atomic import write_bytes
from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.checkpoints.temporary_folders import TemporaryFolder
from understudy.cli.command_errors import TERMINATED, CommandError, reported
from understudy.cli.connection import json_option
from understudy.cli.options import settings_options
from understudy.cli.output import print_json, print_table
from understudy.cli.processes import ChildProcess
from understudy.cli.scoring_options import progress_bar
from understudy.cli.tune_search import (
    Options,
    Ratio,
    Search,
    Trial,
    Turn,
    candidates,
    compare,
    scores_differ,
    whisker,
)
from understudy.cli.values import LocalPath
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluator_errors import EvaluatorError
from understudy.evaluator.settings import CheckpointLocation
from understudy.experiments import ExperimentError
from understudy.service.settings import ServeSettings

if TYPE_CHECKING:
    from understudy.clients import AsyncClient


_REQUESTS = 64
_SERVE = {one.name: one.metadata for one in dataclasses.fields(ServeSettings)}


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What to tune for."""

    run_dir: Path | None = field(default=None, metadata=_SERVE["run_dir"])
    checkpoints: Path | None = field(default=None, metadata=_SERVE["checkpoints"])
    experiment: str | None = field(default=None, metadata=_SERVE["experiment"])
    eval_data: Mapping[str, Path] = field(default_factory=dict, metadata=_SERVE["eval_data"])
    frontend: str = field(default="grpcio", metadata=_SERVE["frontend"])
    logical_cpus: int | None = field(
        default=None, metadata={"help": "Split the CPU into this many devices, one replica each.", "metavar": "N"}
    )
    allow_unsafe_models: bool = field(default=False, metadata={"help": "Load models that name any class or function."})
    connections: int = field(
        default=8, metadata={"help": "Requests in flight, each on its own connection.", "metavar": "N"}
    )
    examples_per_request: int = field(default=1, metadata={"help": "Examples in a request.", "metavar": "N"})
    max_p99_ms: float | None = field(
        default=None,
        metadata={"help": "Take no setting whose 99th percentile of the latency is above this.", "metavar": "MS"},
    )
    budget_seconds: float = field(
        default=600.0, metadata={"help": "How long to search at most, in seconds.", "metavar": "SECONDS"}
    )
    turn_seconds: float = field(
        default=2.0, metadata={"help": "How long one server is measured at a time, in seconds.", "metavar": "SECONDS"}
    )

    def __post_init__(self) -> None:
        for name in ("connections", "examples_per_request", "budget_seconds", "turn_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give more than 0")
        if (self.run_dir is None) == (self.checkpoints is None):
            raise ValueError("give either --run-dir or --checkpoints")
        if self.experiment is None and not self.eval_data:
            raise ValueError("give --experiment or --eval-data, whose examples are sent and scored")

    def check(self) -> None:
        """Check what can be checked before a server starts, which would wait for checkpoints.

        Raises:
            CommandError: There is no checkpoint.
            ConfigurationError: A dataset does not exist.
            ExperimentError: The experiment's file does not exist.
        """
        folder = self.run_dir or self.checkpoints or Path()  # one of them was given
        location = CheckpointLocation(
            folder=folder, is_run=self.run_dir is not None, experiment=self.experiment, eval_data=self.eval_data
        )
        location.check()
        if location.url is not None:
            return  # the servers say what is wrong with it
        if not folder.is_dir():
            raise CommandError(
                f"there is no folder {folder}; give that of the {'run' if location.is_run else 'checkpoints'}"
            )
        if location.is_run and not RunDir(folder).committed_steps():
            raise CommandError(f"there is no checkpoint in {RunDir(folder).checkpoints}; train first")

    def arguments(self, step: int | None) -> list[str]:
        """Return the arguments of ``understudy serve`` for every candidate."""
        given = {
            "--run-dir": self.run_dir,
            "--checkpoints": self.checkpoints,
            "--experiment": self.experiment,
            "--logical-cpus": self.logical_cpus,
            "--version-policy": step,
        }
        flags = [f"{flag}={value}" for flag, value in given.items() if value is not None]
        data = [f"--eval-data={name}={path}" for name, path in self.eval_data.items()]
        unsafe = ["--allow-unsafe-models"] if self.allow_unsafe_models else []
        return [*flags, *data, *unsafe, f"--frontend={self.frontend}", "--evaluation-policy=latest"]


@click.command("tune")
@click.option(
    "--output",
    type=LocalPath(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write what was found to this settings file, for `understudy serve --config`. It must not exist.",
)
@json_option("Print one JSON object.")
@settings_options(settings=TuneSettings)
def command(*, output: Path | None, as_json: bool, settings: TuneSettings) -> None:
    """Search the settings under which `understudy serve` answers most, with the examples of your evaluation.

    \b
    understudy tune --run-dir RUN --experiment digits --output tuned.toml
    understudy serve --run-dir RUN --experiment digits --config tuned.toml

    Servers on this machine, on free ports of 127.0.0.1, are measured by turns: one with the best settings so far, one
    with a candidate. A candidate is taken if the 95 % interval of its ratio is above 1 and the ratio at least 1.03, if
    its latency is within --max-p99-ms, and if it gives every score that the usual settings give. Use a quiet machine
    like the one that will serve, and a run that is not training.
    """  # noqa: D301 - click needs this character, which keeps the line breaks below it
    if output is not None and output.exists():
        raise CommandError(f"{output} exists; give another file, or remove it")
    with _ended_by_sigterm(), reported(EvaluatorError, ExperimentError), progress_bar("tune") as advance:
        settings.check()
        found = _search(settings, advance)
    if as_json:
        print_json({"settings": found.best, "trials": [dataclasses.asdict(trial) for trial in found.trials]})
    else:
        _print(found)
    if output is not None:
        write_bytes(output, _settings_file(found).encode())


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM raise, so that the servers are ended and no file is written."""

    def end(_: int, __: FrameType | None) -> None:
        raise CommandError("ended by SIGTERM", exit_code=TERMINATED)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _search(settings: TuneSettings, advance: Callable[[int, int | None], object]) -> Search:
    """Try one candidate after the other until all are tried, or the time is up."""
    from understudy.devices.host import usable_cores

    began = time.monotonic()
    found = Search()
    load: dict[str, Any] = {"connections": settings.connections, "seconds": settings.turn_seconds}

    def has_time() -> bool:
        spent = time.monotonic() - began
        advance(round(min(spent, settings.budget_seconds)), round(settings.budget_seconds))
        return spent < settings.budget_seconds

    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryFolder()).path
        best = stack.enter_context(TunedServer(settings.arguments(None), {}, folder / "usual"))
        requests, datasets = _requests(settings, best)
        usual = best.scores(datasets)
        in_flight = settings.connections * settings.examples_per_request
        for number, (changed, value) in enumerate(candidates(usable_cores(), examples_in_flight=in_flight)):
            if not has_time():
                break
            try:
                candidate = TunedServer(
                    settings.arguments(best.step), {**found.best, changed: value}, folder / str(number)
                )
            except click.ClickException as error:
                note = error.message.splitlines()[0]
                found.add(Trial(changed=changed, value=value, outcome="failed", note=note))
                continue
            stack.enter_context(candidate)
            trial = compare(
                changed,
                value,
                candidate=partial(candidate.turn, requests, **load),
                best=partial(best.turn, requests, **load),
                max_p99_ms=settings.max_p99_ms,
                has_time=has_time,
            )
            if trial.outcome == "taken" and (difference := scores_differ(candidate.scores(datasets), usual)):
                trial = dataclasses.replace(trial, outcome="other scores", note=difference)
            found.add(trial)
            loser, best = (best, candidate) if trial.outcome == "taken" else (candidate, best)
            loser.close()
    return found


def _requests(settings: TuneSettings, server: TunedServer) -> tuple[Sequence[Mapping[str, Any]], tuple[str, ...]]:
    """Return the first examples of the first dataset as requests, and the names of all datasets."""
    from understudy.clients import Client

    with Client(server.target) as client:
        model = client.metadata()
    inputs = [TensorSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape) for spec in model.inputs]
    outputs = [TensorSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape) for spec in model.outputs]
    signature = Signature(inputs=tuple(inputs), outputs=tuple(outputs))
    batches = _dataset(settings).batches(signature, settings.examples_per_request)
    return [batch.inputs for batch in itertools.islice(batches, _REQUESTS)], model.datasets


def _dataset(settings: TuneSettings) -> EvaluationDataset:
    from understudy.evaluator.datasets.dataset import datasets_of
    from understudy.evaluator.datasets.dataset_files import open_dataset
    from understudy.experiments import load_experiment

    for name, path in settings.eval_data.items():
        return open_dataset(name, path)
    return datasets_of(load_experiment(str(settings.experiment)))[0]


def _print(found: Search) -> None:
    rows = [
        (
            f"{trial.changed} = {trial.value:g}",
            trial.outcome,
            _shown(trial.ratio),
            "" if trial.ratio is None else f"{trial.p99_ms:.1f}",
            "" if trial.ratio is None else whisker(trial.ratio),
            trial.note,
        )
        for trial in found.trials
    ]
    print_table(("setting", "outcome", "requests/s, ratio", "p99, ms", "0.5             1             2", "note"), rows)
    taken = ", ".join(f"{name} = {value:g}" for name, value in found.best.items())
    click.echo(f"Take {taken}." if taken else "The usual settings are as good as any that were tried.")


def _settings_file(found: Search) -> str:
    """Return the text of a settings file, with the reason beside each setting."""
    taken = {trial.changed: trial for trial in found.trials if trial.outcome == "taken"}
    lines = [
        f"{name} = {value:g}  # requests/s times {_shown(taken[name].ratio)}" for name, value in found.best.items()
    ]
    return "\n".join(["# Written by understudy tune.", "[serve]", *lines, ""])


def _shown(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


_START_SECONDS = 120.0
_STOP_SECONDS = 10.0
_REQUEST_SECONDS = 30.0
_WARM_UP_SECONDS = 0.2
_FROZEN_SECONDS = 3.0
"""After this long a server has begun to make constants of the weights; the first turns wait for it."""


class TunedServer:
    """A running ``understudy serve`` with some settings. A context manager that ends it.

    Args:
        arguments: The arguments of ``understudy serve`` that all candidates share.
        options: The settings of this candidate.
        folder: A new folder for its state and its log.
    """

    def __init__(self, arguments: Sequence[str], options: Options, folder: Path) -> None:
        self._stack = ExitStack()
        folder.mkdir()
        flags = [f"--{name.replace('_', '-')}={value:g}" for name, value in options.items()]
        ports = ("--grpc-port", "0", "--http-port", "0", "--state-dir", str(folder / "state"))
        self._process = ChildProcess(
            "the server",
            ["-m", "understudy.cli", "serve", *arguments, *flags, *ports, "--no-self-tuning"],
            log=folder / "server.log",
            ends_with_parent=True,
        )
        self._stack.callback(lambda: self._process.stop(timeout_seconds=_STOP_SECONDS))
        try:
            found = self._process.wait_for_line(
                r"^READY grpc=(\S+) http=\S+ step=(\d+)", timeout_seconds=_START_SECONDS
            )
        except BaseException:
            self._stack.close()
            raise
        self.target, self.step = found[1], int(found[2])
        self._ready_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the server. Idempotent."""
        self._stack.close()

    def scores(self, datasets: Sequence[str]) -> dict[str, dict[str, float]]:
        """Score the version that is served on datasets of the server; return the metrics by dataset."""
        from understudy.clients import Client

        with Client(self.target) as client:
            return {name: dict(client.evaluate_dataset(name, version=self.step).metrics) for name in datasets}

    def turn(self, requests: Sequence[Mapping[str, Any]], *, connections: int, seconds: float) -> Turn:
        """Keep a request in flight on each connection for this long, and measure."""
        time.sleep(max(0.0, self._ready_at + _FROZEN_SECONDS - time.monotonic()))
        return asyncio.run(self._load(requests, connections, seconds))

    async def _load(self, requests: Sequence[Mapping[str, Any]], connections: int, seconds: float) -> Turn:
        from understudy.clients import AsyncClient

        clients = [
            AsyncClient(self.target, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(connections)
        ]
        try:
            await asyncio.gather(*(_ask(client, requests, _WARM_UP_SECONDS) for client in clients))
            began = time.monotonic()
            taken = await asyncio.gather(*(_ask(client, requests, seconds) for client in clients))
            elapsed = time.monotonic() - began
        finally:
            for client in clients:
                await client.close()
        latencies = list(itertools.chain.from_iterable(taken))
        return Turn(requests_per_second=len(latencies) / elapsed, p99_ms=1000 * float(np.percentile(latencies, 99)))


async def _ask(client: AsyncClient, requests: Sequence[Mapping[str, Any]], seconds: float) -> list[float]:
    """Send one request after another; return the latencies in seconds, at least one."""
    taken: list[float] = []
    ends = time.monotonic() + seconds
    for request in itertools.cycle(requests):
        began = time.monotonic()
        await client.predict(request, timeout_seconds=_REQUEST_SECONDS)
        taken.append(time.monotonic() - began)
        if time.monotonic() >= ends:
            break
    return taken
