"""``understudy replay``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import numpy.typing as npt

from understudy.cli.answer_tasks import answer_tasks
from understudy.cli.command_errors import CommandError, reported
from understudy.cli.connection import ConnectionSettings, VersionType, connected, json_option
from understudy.cli.options import settings_options
from understudy.cli.output import print_json, print_table
from understudy.cli.scoring_options import progress_bar
from understudy.cli.values import LocalPath

if TYPE_CHECKING:
    from understudy.clients import Client, ModelMetadata, Version
    from understudy.evaluator.datasets.request_records import LoggedExample
    from understudy.evaluator.types import OutputTask

Array = npt.NDArray[Any]


@click.command("replay")
@click.argument("folder", metavar="DIR", type=LocalPath(exists=True, path_type=Path))
@click.option(
    "--version",
    type=VersionType(),
    required=True,
    help="The version to send the requests to. It must be loaded, as the serving one and the one before are.",
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

    DIR is a folder that `understudy serve --request-log` wrote, or one file of it.
    """  # noqa: D301 - click needs this character, which keeps the line breaks below it
    with connected(settings) as client:
        metadata = client.metadata(version=version)
        replay = Replay(client, version, against, tasks=answer_tasks(metadata), tolerance=tolerance)
        with progress_bar(f"replaying {folder}") as advance:
            examples = _logged_examples(folder, metadata, limit)
            for batch in paced(_batches(examples, batch_size), max_requests_per_second):
                replay.send(batch)
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

    step: int | None = None
    against: int | None = None
    requests: int = 0
    examples: int = 0
    logged_steps: dict[int, int] = field(default_factory=dict)
    outputs: dict[str, OutputDifference] = field(default_factory=dict)


class Replay:
    """Sends batches of logged examples, and compares the answers.

    Args:
        client: The server.
        version: The version to ask.
        tasks: What its outputs are for, by their names.
        against: The version to compare with; None for the logged answers.
        tolerance: See the command's help.

    Attributes:
        result: What was found so far.
    """

    def __init__(
        self,
        client: Client,
        version: Version,
        against: Version | None,
        *,
        tasks: Mapping[str, OutputTask],
        tolerance: float,
    ) -> None:
        self._client = client
        self._version = version
        self._tasks = tasks
        self._against = against
        self._tolerance = tolerance
        self.result = ReplayResult()

    def send(self, batch: Sequence[LoggedExample]) -> None:
        """Send one batch of examples of the same shapes.

        Raises:
            CommandError: Inputs were redacted, and the answers would be compared with the logged ones.
            understudy.clients.UnderstudyError: The server did not answer.
        """
        inputs = _stacked([example.inputs for example in batch])
        found = self._client.predict(inputs, version=self._version)
        self.result.step = found.step
        before = self._answers_before(batch, inputs)
        self.result.requests += 1
        self.result.examples += len(batch)
        for example in batch:
            self.result.logged_steps[example.step] = self.result.logged_steps.get(example.step, 0) + 1
        for name, now in found.outputs.items():
            if name not in before:
                raise CommandError(
                    f"there is no output {name!r} to compare with; there is {', '.join(map(repr, before))}"
                )
            difference = self.result.outputs.setdefault(name, OutputDifference())
            difference.add(now, before[name], self._tolerance, self._tasks.get(name))
            difference.finish(self.result.examples)

    def _answers_before(self, batch: Sequence[LoggedExample], inputs: dict[str, Array]) -> dict[str, Array]:
        if self._against is not None:
            answered = self._client.predict(inputs, version=self._against)
            self.result.against = answered.step
            return dict(answered.outputs)
        redacted = batch[0].redacted
        if redacted:
            raise CommandError(
                f"the values of {', '.join(map(repr, redacted))} were redacted, so the logged answers belong to other "
                "requests; give --against, which sends the same to both versions"
            )
        return _stacked([example.answers for example in batch])


def _logged_examples(folder: Path, metadata: ModelMetadata, limit: int | None) -> Iterator[LoggedExample]:
    from itertools import islice

    from understudy.checkpoints.signature import Signature, TensorSpec
    from understudy.evaluator.datasets.dataset_files import find_records
    from understudy.evaluator.datasets.request_records import read_logged
    from understudy.evaluator.evaluator_errors import EvaluatorError

    def specs(tensors: Sequence[Any]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(**dataclasses.asdict(tensor)) for tensor in tensors)

    signature = Signature(inputs=specs(metadata.inputs), outputs=specs(metadata.outputs))
    files = find_records(folder)
    if not files and folder.is_file():
        raise CommandError(f"{folder} is no request log; give the folder that --request-log names, or a file of it")
    with reported(EvaluatorError):
        yield from islice(read_logged(files, signature), limit)


def _batches(examples: Iterator[LoggedExample], size: int) -> Iterator[list[LoggedExample]]:
    """Group examples in order into batches of the same shapes, and of the same redaction."""
    batch: list[LoggedExample] = []
    for example in examples:
        if batch and (len(batch) == size or _form(example) != _form(batch[0])):
            yield batch
            batch = []
        batch.append(example)
    if batch:
        yield batch


def _form(example: LoggedExample) -> tuple[Any, ...]:
    arrays = (*example.inputs.items(), *example.answers.items())
    return example.redacted, tuple((name, array.shape) for name, array in arrays)


def paced(batches: Iterator[list[LoggedExample]], rate: float) -> Iterator[list[LoggedExample]]:
    """Yield batches at most at a rate."""
    next_at = time.monotonic()
    for batch in batches:
        time.sleep(max(0.0, next_at - time.monotonic()))
        next_at = time.monotonic() + 1 / rate
        yield batch


def _stacked(rows: Sequence[Any]) -> dict[str, Array]:
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
