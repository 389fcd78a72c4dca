"""The end of both demos: compares numbers, scrapes metrics, draws digits."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from understudy.cli.demo.progress_printer import ProgressPrinter
from understudy.cli.processes import ChildProcess
from understudy.clients import Client, EvaluateResult, SliceScore
from understudy.experiments.digits_data import Images

BATCH_SIZE = 32
SHOWN_DIGITS = 5
SHOWN_SLICES = 2
RESAMPLES = 200
ACCURACY_GOAL = 0.97
LARGEST_DIFFERENCE = 1e-6
_SHOWN_METRICS = (
    "understudy_serving_step",
    "understudy_replicas",
    "understudy_examples_total",
    "understudy_evaluation_metric",
    "understudy_checkpoint_loads_total",
)

_REFERENCE_SECONDS = 60.0


def evaluated_by_keras(model_file: Path, test: Images, *, folder: Path) -> dict[str, float]:
    """Score the test images with ``model.evaluate``, in a separate process.

    Raises:
        click.ClickException: The process failed.
    """
    test_file = folder / "test.npz"
    np.savez(test_file, x=test.x, y=test.y)
    command = ["-m", "understudy.cli.demo.reference", str(model_file), str(test_file), str(BATCH_SIZE)]
    process = ChildProcess("reference", command, log=folder / "reference.log")
    try:
        found = process.wait_for_line(r"^\{.*\}$", timeout_seconds=_REFERENCE_SECONDS)
    finally:
        process.stop()
    values: dict[str, float] = json.loads(found[0])
    return values


def compare(
    client: Client, test: Images, *, expected: Mapping[str, float], step: int, printer: ProgressPrinter
) -> EvaluateResult:
    """Score the test images over gRPC, and compare the numbers with the expected ones.

    Raises:
        click.ClickException: They differ by more than `LARGEST_DIFFERENCE`.
    """
    starts = range(0, len(test.x), BATCH_SIZE)
    batches = [(test.x[start : start + BATCH_SIZE], test.y[start : start + BATCH_SIZE]) for start in starts]
    served = client.evaluate(batches, version=step, slices=["label"], resamples=RESAMPLES)
    printer.heading(f"Step {served.step} on the {served.examples} test images")
    for name in sorted(expected):
        difference = abs(served.metrics[name] - expected[name])
        printer.text(
            f"  {name:<10} Evaluate over gRPC {served.metrics[name]:.7f}   "
            f"model.evaluate in process {expected[name]:.7f}   difference {difference:.1e}"
        )
        if difference > LARGEST_DIFFERENCE:
            raise click.ClickException(f"{name} differs by {difference}, more than {LARGEST_DIFFERENCE}")
    _show_parts(served, printer)
    return served


def _show_parts(served: EvaluateResult, printer: ProgressPrinter) -> None:
    """Show the interval of the accuracy, and the digits that are recognized least."""
    printer.text(f"  {'slice':<10} {'examples':>8}   accuracy with its {served.confidence:.0%} interval")
    lowest = sorted(served.slices, key=lambda part: part.metrics["accuracy"])[:SHOWN_SLICES]
    rows: list[tuple[str, EvaluateResult | SliceScore]] = [("all", served), *((part.name, part) for part in lowest)]
    for name, part in rows:
        found = part.intervals["accuracy"]
        value = part.metrics["accuracy"]
        printer.text(f"  {name:<10} {part.examples:>8}   {value:.4f} [{found.low:.4f}, {found.high:.4f}]")


def require_accuracy(result: EvaluateResult) -> None:
    """Raise click.ClickException if the test accuracy is below the goal."""
    accuracy = result.metrics["accuracy"]
    if accuracy < ACCURACY_GOAL:
        raise click.ClickException(f"the test accuracy is {accuracy:.4f}, below the {ACCURACY_GOAL} it should reach")


def scrape(http_target: str, printer: ProgressPrinter) -> None:
    """Fetch ``/metrics`` as Prometheus would, and show a few lines."""
    with urllib.request.urlopen(f"http://{http_target}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    printer.heading(f"http://{http_target}/metrics, {len(lines)} lines, among them")
    for line in lines:
        if line.startswith(_SHOWN_METRICS) and "_created" not in line:
            printer.text(f"  {line}")


def draw_digits(client: Client, test: Images, printer: ProgressPrinter) -> None:
    """Predict a few digits, and draw them with the predictions."""
    shown = test.x[:SHOWN_DIGITS]
    prediction = client.predict(shown)
    captions = [
        f"{example.argmax()} ({example.max():.0%})"
        if example.argmax() == label
        else f"{example.argmax()}, but it is a {label}"
        for example, label in zip(prediction.output, test.y[:SHOWN_DIGITS], strict=True)
    ]
    printer.heading(f"A few test images, and what step {prediction.step} sees in them")
    printer.text(side_by_side(shown[..., 0], captions))


_SHADES = " ░▒▓█"


def rows_of_image(image: npt.NDArray[np.float32]) -> list[str]:
    """Draw one image.

    Args:
        image: Grey values in 0..1, ``[height, width]``.

    Returns:
        One line per row of pixels, two characters per pixel, since characters are about twice as high as wide.
    """
    levels = np.clip(image * len(_SHADES), 0, len(_SHADES) - 1).astype(int)
    return ["".join(_SHADES[level] * 2 for level in row) for row in levels]


def side_by_side(images: npt.NDArray[np.float32], captions: Sequence[str]) -> str:
    """Draw images ``[n, height, width]`` in one line, each with its caption below."""
    drawings = [rows_of_image(image) for image in images]
    width = len(drawings[0][0])
    lines = ["  ".join(parts) for parts in zip(*drawings, strict=True)]
    lines.append("  ".join(caption.center(width) for caption in captions))
    return "\n".join(lines)
