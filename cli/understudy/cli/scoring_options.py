"""Shared by the commands that score: metric options, batches from a file, and progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from understudy.cli.arrays import Examples
    from understudy.clients import Metric

ProgressCallback = Callable[[int, int | None], None]
"""Called with the number of examples done, and the total or None."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _MetricType(click.ParamType["Metric"]):
    name = "metric"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Metric:
        from understudy.clients import Metric

        name, equals, text = str(value).partition("=")
        try:
            config = json.loads(text) if equals else {}
        except json.JSONDecodeError as error:
            return self.fail(f"what follows {name}= is not JSON: {error}", param, ctx)
        if not isinstance(config, dict):
            return self.fail(f"what follows {name}= is not a JSON object: {text}", param, ctx)
        return Metric(name=name, config=config)


metric_option = click.option(
    "--metric",
    "metrics",
    type=_MetricType(),
    multiple=True,
    metavar="NAME[=JSON]",
    help='A Keras metric with its configuration, such as AUC={"curve":"PR"}, of all outputs or of one (OUTPUT/AUC); '
    "repeatable. The compiled ones by default.",
)


def _checked_slices(_: click.Context, __: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    if value:
        from understudy.evaluator.evaluation.slices import SliceError, parse_slices

        try:
            parse_slices(value)
        except SliceError as error:
            raise click.BadParameter(str(error)) from error
    return value


slice_option = click.option(
    "--slice",
    "slices",
    multiple=True,
    callback=_checked_slices,
    metavar="FEATURE",
    help="Score this part of the examples, too: label, predicted or a feature in FILE; age:18,30,65 in buckets; "
    "country*label crossed. Repeatable.",
)

slice_min_examples_option = click.option(
    "--slice-min-examples",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Slices with fewer examples have no metrics.",
)


def resampling_options(*, least: int, default: int, resamples: str, confidence: str) -> Callable[[_Command], _Command]:
    """Add ``--resamples`` and ``--confidence``.

    Args:
        least: The fewest resamples that may be given.
        default: How many there are if none are given.
        resamples: The help of the one.
        confidence: The help of the other.
    """

    def add(command: _Command) -> _Command:
        shares = click.FloatRange(0, 1, min_open=True, max_open=True)
        command = click.option(
            "--confidence", type=shares, default=0.95, show_default=True, metavar="SHARE", help=confidence
        )(command)
        counts = click.IntRange(least, 10_000)
        return click.option(
            "--resamples", type=counts, default=default, show_default=True, metavar="N", help=resamples
        )(command)

    return add


batch_size_option = click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    metavar="N",
    help="Examples per batch; to a server fewer, if they have more than 8 MiB.",
)


def counted_batches(examples: Examples, batch_size: int, advance: ProgressCallback) -> Iterator[tuple[Any, ...]]:
    """Yield examples in batches, reporting progress."""
    sent = 0
    for batch in examples.batches_of(batch_size):
        advance(sent, examples.count)
        yield batch
        sent += len(next(iter(batch[0].values())))


@contextmanager
def progress_bar(description: str) -> Iterator[ProgressCallback]:
    """Show a bar on stderr if it is a terminal; yield the function that sets its progress."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
