"""``understudy top``."""

from __future__ import annotations

import dataclasses
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import click

from understudy.cli.command_errors import TERMINATED
from understudy.cli.connection import ConnectionSettings, connected, json_option
from understudy.cli.options import settings_options
from understudy.cli.output import evaluation_as_json, print_json, printable, say
from understudy.cli.status import DECISIONS, latest_evaluations, roles, scores
from understudy.service.live_numbers import LiveNumbers, LiveReader

if TYPE_CHECKING:
    from rich.console import RenderableType

    from understudy.clients import Checkpoint, Client, Evaluation, ModelStatus, VersionStatus

SHOWN_VERSIONS: Final = 12
"""The newest versions that the table lists, besides those that serve, are pinned or best."""
CALL_SECONDS: Final = 5.0
"""How long a call may take by default; the next one is made after it."""

_SERIES: Final = re.compile(r"((?:grpc_server_handl|understudy_)\w+)(?:\{(.*)\})? (\S+)", re.ASCII)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"', re.ASCII)
_TO_SCORE: Final = "understudy_checkpoints_waiting"
_TRAINING: Final = "understudy_run_"
STATES: Final = ("running", "finished", "failed")
_SHOWN_APART: Final = frozenset(
    {
        *("state", "step", "steps", "examples_per_second", "input_wait_ratio"),
        *("remaining_seconds", "checkpoint_age_seconds"),
    }
)
_MIB: Final = 1024 * 1024
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


class Series(NamedTuple):
    """The value of one series of the Prometheus text format."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a server reported at one time.

    Attributes:
        at: The time of the last answer.
        status: Its versions.
        evaluations: The latest entries of the ledger about the newest versions.
        checkpoints: The checkpoints that it sees.
        training: The metrics of the training in its run folder; empty without one.
        live: Its traffic.
        to_score: How many checkpoints wait to be scored, or are being scored.
    """

    at: datetime
    status: ModelStatus
    evaluations: Sequence[Evaluation]
    checkpoints: Sequence[Checkpoint]
    training: Mapping[str, float]
    live: LiveNumbers
    to_score: int


class Reader:
    """Reads snapshots of one server over gRPC.

    Args:
        client: The client.
        timeout_seconds: How long each call may take.
    """

    def __init__(self, client: Client, *, timeout_seconds: float) -> None:
        self._client = client
        self._timeout = timeout_seconds
        self._series: list[Series] = []
        self._live = LiveReader(lambda: self._series)

    def read(self) -> Snapshot:
        """Return a snapshot; raise the errors of the client."""
        client, timeout = self._client, self._timeout
        self._series = list(parse_series(client.metrics(timeout_seconds=timeout)))
        status = client.status(timeout_seconds=timeout)
        entries = [each for steps in _ranges(status) for each in self._entries(*steps)]
        return Snapshot(
            status=status,
            evaluations=latest_evaluations(sorted(entries, key=lambda each: each.sequence)),
            checkpoints=client.checkpoints(timeout_seconds=timeout),
            training=dict(_training_series(self._series)),
            live=self._live.read(),
            to_score=int(next((each.value for each in self._series if each.name == _TO_SCORE), 0)),
            at=datetime.now(UTC),
        )

    def _entries(self, min_step: int, max_step: int) -> Iterator[Evaluation]:
        return self._client.list_evaluations(min_step=min_step, max_step=max_step, timeout_seconds=self._timeout)


@click.command("top")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to ask the server.",
)
@click.option("--once", is_flag=True, help="Show the present state and end.")
@json_option("Print one JSON object each time.")
@settings_options(settings=ConnectionSettings)
def command(*, interval: float, once: bool, as_json: bool, settings: ConnectionSettings) -> None:
    """Show what a server does, until interrupted: what it serves and why, what comes next, scores and traffic.

    A server that does not answer is asked again until it does.
    """
    target = ", ".join(settings.target)
    timeout = CALL_SECONDS if settings.timeout_seconds is None else settings.timeout_seconds
    with connected(settings) as client:
        reader = Reader(client, timeout_seconds=timeout)
        if once:
            _print(reader.read(), "", target, as_json=as_json)
            return
        try:
            if sys.stdout.isatty() and not as_json:
                _follow_on_screen(reader, interval, target)
            else:
                _follow(reader, interval, lambda found, trouble: _print(found, trouble, target, as_json=as_json))
        except KeyboardInterrupt:
            return


def _follow(reader: Reader, interval: float, show: Callable[[Snapshot | None, str], None]) -> NoReturn:
    """Show snapshots; while the server does not answer, the last one with the reason."""
    from understudy.clients import DeadlineExceededError, UnavailableError

    found: Snapshot | None = None
    failing_since: datetime | None = None
    while True:
        due = time.monotonic() + interval
        try:
            found = reader.read()
            failing_since = None
            show(found, "")
        except (UnavailableError, DeadlineExceededError) as error:
            failing_since = failing_since or datetime.now(UTC)
            show(found, f"no answer since {_clock(failing_since)}, asking again: {error}")
        time.sleep(max(0.0, due - time.monotonic()))


def _follow_on_screen(reader: Reader, interval: float, target: str) -> None:
    from rich.live import Live

    def end(*_: object) -> NoReturn:
        sys.exit(TERMINATED)

    signal.signal(signal.SIGTERM, end)  # the screen is restored
    with Live(screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        _follow(reader, interval, lambda found, trouble: live.update(render(found, trouble, target), refresh=True))


def _print(found: Snapshot | None, trouble: str, target: str, *, as_json: bool) -> None:
    if trouble:
        say(trouble, err=True)
    elif found is not None and as_json:
        print_json(as_object(found))
    elif found is not None:
        from rich.console import Console

        Console().print(render(found, trouble, target))


def parse_series(exposition: str) -> Iterator[Series]:
    """Yield the series of the Prometheus text format that this command may need."""
    for line in exposition.splitlines():
        if (match := _SERIES.fullmatch(line)) is not None:
            labels = {name: _unescaped(value) for name, value in _LABEL.findall(match[2] or "")}
            yield Series(match[1], labels, float(match[3]))


def _training_series(found: Sequence[Series]) -> Iterator[tuple[str, float]]:
    """Yield what is known of the training: numbers by their names, its state as the name of a 1."""
    for name, labels, value in found:
        if name.startswith(_TRAINING) and not math.isnan(value):
            short = name.removeprefix(_TRAINING)
            yield labels.get("metric") or labels.get("state") or short, value


def _unescaped(value: str) -> str:
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], value)


def shown_versions(status: ModelStatus) -> list[VersionStatus]:
    """Return the newest versions, and those that serve, are pinned or best, newest first."""
    named = {status.serving_step, status.best_step, status.pinned_step}
    newest = {version.step for version in status.versions[:SHOWN_VERSIONS]}
    return [version for version in status.versions if version.step in newest | named]


def _ranges(status: ModelStatus) -> list[tuple[int, int]]:
    """Return the lowest and the highest step of the newest versions, and each older one that the table lists."""
    newest = [version.step for version in status.versions[:SHOWN_VERSIONS]]
    if not newest:
        return []
    older = [version.step for version in shown_versions(status) if version.step not in newest]
    return [(min(newest), max(newest)), *((step, step) for step in older)]


def as_object(found: Snapshot) -> dict[str, Any]:
    """Return a snapshot as an object of JSON."""
    return {
        "at": found.at.isoformat(),
        "model_name": found.status.model_name,
        "serving": {"step": found.status.serving_step, "why": why(found)},
        "next": next_up(found),
        "versions": [dataclasses.asdict(version) for version in shown_versions(found.status)],
        "evaluations": [evaluation_as_json(each) for each in found.evaluations],
        "traffic": dataclasses.asdict(found.live),
        "to_score": found.to_score,
        "training": training(found),
    }


def why(found: Snapshot) -> str:
    """Return why the serving version is served, as far as the server tells its callers."""
    status = found.status
    step = status.serving_step
    decided = [each for each in found.evaluations if each.outcome in DECISIONS]
    if step is None:
        return "nothing is served yet" + "".join(f"; {_decision(each)}" for each in decided[-1:])
    if step == status.pinned_step:
        return "it is pinned"
    reasons = [_decision(each) for each in decided if each.step == step]
    roles_of_it = {"the best by the monitored metric": status.best_step, "the newest": status.latest_step}
    reasons += [f"it is {role}" for role, of_role in roles_of_it.items() if of_role == step]
    return "; ".join(reasons) or "by the version policy"


def _decision(evaluation: Evaluation) -> str:
    reason = f": {evaluation.reason}" if evaluation.reason else ""
    verb = "is undecided on" if evaluation.outcome == "undecided" else evaluation.outcome
    return f"the gate {verb} step {evaluation.step}{reason}"


def next_up(found: Snapshot) -> list[str]:
    """Return what comes after the serving version, each in some words."""
    versions = found.status.versions
    lines = [f"step {version.step} is loading" for version in versions if version.state == "LOADING"]
    waiting = [version.step for version in versions if version.state == "START"]
    if waiting:
        lines.append(f"{len(waiting)} wait to be loaded, the newest is step {max(waiting)}")
    if found.to_score:
        lines.append(f"{found.to_score} wait to be scored, or are being scored")
    held = [
        each
        for each in found.evaluations
        if each.outcome in ("refused", "undecided") and each.step > (found.status.serving_step or -1)
    ]
    lines += [_decision(each) for each in held[-1:]]
    return lines


def training(found: Snapshot) -> dict[str, Any]:
    """Return how far the training has come: by its journal, and of other programs' runs by their checkpoints."""
    known: dict[str, Any] = {"state": next((name for name in STATES if found.training.get(name)), None)}
    known |= {name: value for name, value in found.training.items() if name not in STATES}
    if found.checkpoints:
        last = found.checkpoints[-1]
        known.setdefault("step", last.step)
        known["checkpoint_age_seconds"] = (found.at - last.created_at).total_seconds()
        known["state"] = known["state"] or ("finished" if last.final else None)
    return known


def render(found: Snapshot | None, trouble: str, target: str) -> RenderableType:
    """Return a snapshot for a terminal, with why it is not a new one."""
    from rich.console import Group
    from rich.text import Text

    if found is None:
        return Text(printable(f"{target}: {trouble}"), style="red")
    heading = Text.assemble((printable(found.status.model_name), "bold"), f" at {target}, {_clock(found.at)}")
    parts: list[RenderableType] = [heading, *([Text(printable(trouble), style="red")] if trouble else []), Text()]
    return Group(*parts, _facts(found), Text(), _table(found))


def _facts(found: Snapshot) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    step = found.status.serving_step
    serving = why(found) if step is None else f"step {step}: {why(found)}"
    facts = {
        "serving": serving,
        "next": "\n".join(next_up(found)) or "nothing waits",
        "training": _training_line(training(found)),
        "traffic": _traffic_line(found.live),
        "devices": _devices_line(found.live),
    }
    for name, text in facts.items():
        grid.add_row(name, Text(printable(text, keep="\n")))
    return grid


def _table(found: Snapshot) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("step", "state", "role", "evaluations"):
        table.add_column(Text(heading), style="bold" if heading == "step" else "")
    for version in shown_versions(found.status):
        said = version.error or scores(version.step, found.evaluations)
        cells = (str(version.step), version.state, " ".join(roles(version, found.status)), said)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _training_line(known: Mapping[str, Any]) -> str:
    if "step" not in known:
        return "not begun"
    total = f" of {known['steps']:.0f}" if "steps" in known else ""
    parts = [f"{known['state'] or 'its newest checkpoint is'} at step {known['step']:.0f}{total}"]
    parts += [f"{name} {value:.4g}" for name, value in known.items() if name not in _SHOWN_APART]
    if "examples_per_second" in known:
        parts.append(f"{known['examples_per_second']:.4g} examples in a second")
    if "input_wait_ratio" in known:
        parts.append(f"{known['input_wait_ratio']:.0%} of it waiting for input")
    if "remaining_seconds" in known and known["state"] == "running":
        parts.append(f"{_duration(known['remaining_seconds'])} left")
    if "checkpoint_age_seconds" in known:
        parts.append(f"last checkpoint {_duration(known['checkpoint_age_seconds'])} ago")
    return ", ".join(parts)


def _traffic_line(live: LiveNumbers) -> str:
    over = "since the start" if live.window_seconds is None else f"in {live.window_seconds:.0f} s"
    rate = "" if live.rate is None else f"{live.rate:.1f} calls in a second, "
    latency = [
        f"p{share} {_duration(seconds)}"
        for share, seconds in ((50, live.p50_seconds), (99, live.p99_seconds))
        if seconds is not None
    ]
    parts = [f"{live.failed} failed {over}", *latency, f"{live.queue_examples} examples queued"]
    return f"{rate}{', '.join(parts)}; {live.requests} calls in all"


def _devices_line(live: LiveNumbers) -> str:
    memory = [f"{device} {size / _MIB:,.0f} MiB" for device, size in live.memory.items()]
    return ", ".join([f"{live.replicas} replicas", *memory])


def _duration(seconds: float) -> str:
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min"), (1, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{max(seconds, 0) * 1e6:.0f} µs"


def _clock(at: datetime) -> str:
    return f"{at.astimezone():%H:%M:%S}"
