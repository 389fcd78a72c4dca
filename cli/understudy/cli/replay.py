"""``understudy replay``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np
import numpy.typing as npt

from understudy.cli.answer_tasks import answer_tasks
from understudy.cli.asked_version import AskedVersion
from understudy.cli.command_errors import CommandError, reported
from understudy.cli.connection import ConnectionSettings, VersionType, connected, json_option
from understudy.cli.options import settings_options
from understudy.cli.output import print_json, print_table
from understudy.cli.scoring_options import progress_bar
from understudy.cli.values import LocalPath

if TYPE_CHECKING:
    from understudy.clients import ReplayedModel, Version
    from understudy.evaluator.datasets.request_records import LoggedExample
    from understudy.evaluator.types import Arrays, OutputTask

Array = npt.NDArray[Any]

_ROUND_BYTES: Final = 1 << 26
_ROUND_SECONDS: Final = 600.0


@click.command("replay")
@click.argument("folder", metavar="DIR", type=LocalPath(exists=True, path_type=Path))
@click.option(
    "--version",
    type=VersionType(),
    required=True,
    help="The version to send the requests to. One that is not loaded is loaded for it.",
)
@click.option(
    "--against",
    type=VersionType(),
    help="Send them to this version too, and compare with its answers; by default with the logged ones.",
)
@click.option(
    "--max-requests-per-second",
    type=click.FloatRange(0, min_open=True),
    default=100.0,
    show_default=True,
    metavar="RATE",
    help="The most requests to send in a second.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    metavar="N",
    help="The most examples of one request. Examples of other shapes begin a new one.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Stop after this many examples.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    default=1e-6,
    show_default=True,
    metavar="T",
    help="Values a and b differ if |a - b| is more than T + T·|b|.",
)
@json_option("Print one JSON object with the differences of each output.")
@settings_options(settings=ConnectionSettings)
def command(
    *,
    folder: Path,
    version: Version,
    against: Version | None,
    max_requests_per_second: float,
    batch_size: int,
    limit: int | None,
    tolerance: float,
    as_json: bool,
    settings: ConnectionSettings,
) -> None:
    """Send logged requests to another version, and compare its answers.

    \b
    understudy replay DIR --version 200
    understudy replay DIR --version 200 --against 100

    DIR is a folder that `understudy serve --request-log` wrote, or one file of it. The server answers live requests
    first, and does not log these.
    """  # noqa: D301 - click needs this character, which keeps the line breaks below it
    with ExitStack() as stack:
        client = stack.enter_context(connected(settings))
        other = None if against is None else stack.enter_context(AskedVersion.of(client, against))
        asked = stack.enter_context(AskedVersion.of(client, version))
        replay = Replay(asked, other, tolerance=tolerance, rate_limit=RateLimit(max_requests_per_second))
        with progress_bar(f"replaying {folder}") as advance:
            batches = _batches(_logged_examples(folder, asked.model, limit), batch_size)
            for batches_of_round in _rounds(batches, most=int(max_requests_per_second * _ROUND_SECONDS)):
                replay.send(batches_of_round)
                advance(replay.result.examples, limit)
    if not replay.result.examples:
        raise CommandError(f"{folder} holds no logged requests yet; a service writes them once a minute")
    if as_json:
        print_json(dataclasses.asdict(replay.result))
    else:
        _show(replay.result)


@dataclass(kw_only=True)
class OutputDifference:
    """How the answers of one output differ.

    Attributes:
        differing_examples: The examples of which at least one value differs.
        differing_share: Their share of all examples.
        largest_difference: The largest absolute difference of two values; None for strings, or if shapes differ.
        class_flips: The examples whose class (the index of the largest value) is another, or of which another label
            holds; None if the output decides neither.
        class_flip_share: Their share of all examples.
    """

    differing_examples: int = 0
    differing_share: float = 0.0
    largest_difference: float | None = None
    class_flips: int | None = None
    class_flip_share: float | None = None

    def add(self, now: Array, before: Array, tolerance: float, task: OutputTask | None = None) -> None:
        """Add a batch of answers ``[examples, ...]`` of an output; its task is unknown if None."""
        from understudy.evaluator.evaluation.answer_differences import flips

        if now.shape != before.shape:
            self.differing_examples += len(now)
            return
        flat_now, flat_before = now.reshape(len(now), -1), before.reshape(len(before), -1)
        if now.dtype.kind == "O":
            self.differing_examples += int((flat_now != flat_before).any(axis=1).sum())
            return
        a, b = flat_now.astype(np.float64), flat_before.astype(np.float64)
        close = np.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        self.differing_examples += int((~close).any(axis=1).sum())
        gaps = np.abs(a - b)[~close]
        self.largest_difference = max(self.largest_difference or 0.0, float(gaps.max()) if gaps.size else 0.0)
        flipped = flips(task, now, before)
        if flipped is not None:
            self.class_flips = (self.class_flips or 0) + int(flipped.sum())

    def finish(self, examples: int) -> None:
        """Set the shares."""
        self.differing_share = self.differing_examples / examples
        self.class_flip_share = None if self.class_flips is None else self.class_flips / examples


@dataclass(kw_only=True)
class ReplayResult:
    """What a replay found.

    Attributes:
        step: The step that answered.
        against: The step that it is compared with; None for the logged answers.
        requests: The requests sent to each version.
        examples: Their examples.
        logged_steps: The examples by the step that answered them when they were logged.
        outputs: The differences of each output.
    """

    step: int
    against: int | None
    requests: int = 0
    examples: int = 0
    logged_steps: dict[int, int] = field(default_factory=dict)
    outputs: dict[str, OutputDifference] = field(default_factory=dict)


class Replay:
    """Sends batches of logged examples, and compares the answers.

    Args:
        version: The version to ask.
        against: The version to compare with; None for the logged answers.
        tolerance: See the command's help.
        rate_limit: Delays the requests.

    Attributes:
        result: What was found so far.
    """

    def __init__(
        self, version: AskedVersion, against: AskedVersion | None, *, tolerance: float, rate_limit: RateLimit
    ) -> None:
        self._version = version
        self._against = against
        self._tasks = answer_tasks(version.model)
        self._tolerance = tolerance
        self._rate_limit = rate_limit
        self.result = ReplayResult(step=version.model.step, against=None if against is None else against.model.step)

    def send(self, batches: Sequence[Sequence[LoggedExample]]) -> None:
        """Send batches, each of examples of the same shapes: to one version, then to the other.

        Raises:
            CommandError: Inputs were redacted, and the answers would be compared with the logged ones.
            understudy.clients.UnderstudyError: The server did not answer.
        """
        inputs = [_stacked([example.inputs for example in batch]) for batch in batches]
        before = map(_logged_answers, batches) if self._against is None else self._answers(self._against, inputs)
        for batch, now, then in zip(batches, self._answers(self._version, inputs), list(before), strict=True):
            self._compare(batch, now, then)

    def _answers(self, version: AskedVersion, inputs: Sequence[Arrays]) -> list[Arrays]:
        found = []
        for each in inputs:
            self._rate_limit.wait()
            found.append(version.predict(each))
        version.release()
        return found

    def _compare(self, batch: Sequence[LoggedExample], now: Arrays, before: Arrays) -> None:
        self.result.requests += 1
        self.result.examples += len(batch)
        for example in batch:
            self.result.logged_steps[example.step] = self.result.logged_steps.get(example.step, 0) + 1
        for name, answered in now.items():
            if name not in before:
                raise CommandError(
                    f"there is no output {name!r} to compare with; there is {', '.join(map(repr, before))}"
                )
            difference = self.result.outputs.setdefault(name, OutputDifference())
            difference.add(answered, before[name], self._tolerance, self._tasks.get(name))
            difference.finish(self.result.examples)


def _logged_answers(batch: Sequence[LoggedExample]) -> Arrays:
    redacted = batch[0].redacted
    if redacted:
        raise CommandError(
            f"the values of {', '.join(map(repr, redacted))} were redacted, so the logged answers belong to other "
            "requests; give --against, which sends the same to both versions"
        )
    return _stacked([example.answers for example in batch])


def _logged_examples(folder: Path, model: ReplayedModel, limit: int | None) -> Iterator[LoggedExample]:
    from itertools import islice

    from understudy.checkpoints.signature import Signature, TensorSpec
    from understudy.evaluator.datasets.dataset_files import find_records
    from understudy.evaluator.datasets.request_records import read_logged
    from understudy.evaluator.evaluator_errors import EvaluatorError

    def specs(tensors: Sequence[Any]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(**dataclasses.asdict(tensor)) for tensor in tensors)

    signature = Signature(inputs=specs(model.inputs), outputs=specs(model.outputs))
    files = find_records(folder)
    if not files and folder.is_file():
        raise CommandError(f"{folder} is no request log; give the folder that --request-log names, or a file of it")
    with reported(EvaluatorError):
        yield from islice(read_logged(files, signature), limit)


def _batches(examples: Iterator[LoggedExample], size: int) -> Iterator[list[LoggedExample]]:
    """Group examples in order into batches of the same shapes and of the same redaction, which a request may hold."""
    from understudy.cli.arrays import LARGEST_REQUEST_BYTES

    batch: list[LoggedExample] = []
    for example in examples:
        most = max(1, min(size, LARGEST_REQUEST_BYTES // max(1, _bytes_of(example))))
        if batch and (len(batch) >= most or _form(example) != _form(batch[0])):
            yield batch
            batch = []
        batch.append(example)
    if batch:
        yield batch


def _form(example: LoggedExample) -> tuple[Any, ...]:
    arrays = (*example.inputs.items(), *example.answers.items())
    return example.redacted, tuple((name, array.shape) for name, array in arrays)


def _rounds(batches: Iterator[list[LoggedExample]], *, most: int) -> Iterator[list[list[LoggedExample]]]:
    """Group batches into rounds, each of which fits into memory and is sent in a while.

    The versions answer a round one after the other, as a server may have room for one of them only.

    Args:
        batches: The batches.
        most: The most batches of a round.
    """
    found: list[list[LoggedExample]] = []
    size = 0
    for batch in batches:
        found.append(batch)
        size += sum(map(_bytes_of, batch))
        if len(found) >= most or size >= _ROUND_BYTES:
            yield found
            found, size = [], 0
    if found:
        yield found


def _bytes_of(example: LoggedExample) -> int:
    return sum(array.nbytes for array in (*example.inputs.values(), *example.answers.values()))


class RateLimit:
    """Delays requests, so that there are at most so many in a second.

    Args:
        rate: The most in a second.
    """

    def __init__(self, rate: float) -> None:
        self._seconds = 1 / rate
        self._next_at = time.monotonic()

    def wait(self) -> None:
        """Wait until the next request may be sent."""
        time.sleep(max(0.0, self._next_at - time.monotonic()))
        self._next_at = time.monotonic() + self._seconds


def _stacked(rows: Sequence[Any]) -> Arrays:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _show(result: ReplayResult) -> None:
    logged = ", ".join(f"step {step}: {count}" for step, count in sorted(result.logged_steps.items()))
    other = f"step {result.against}" if result.against is not None else f"the logged answers ({logged})"
    rows = [
        (
            name,
            f"{each.differing_examples} ({each.differing_share:.2%})",
            "" if each.largest_difference is None else f"{each.largest_difference:.6g}",
            "" if each.class_flips is None else f"{each.class_flips} ({each.class_flip_share:.2%})",
        )
        for name, each in result.outputs.items()
    ]
    title = f"{result.examples} examples in {result.requests} requests: step {result.step} and {other}"
    print_table(("output", "examples that differ", "largest difference", "class flips"), rows, title=title)
