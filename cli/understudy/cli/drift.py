"""``understudy drift``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import click
import numpy as np

from understudy.cli.answer_tasks import answer_tasks
from understudy.cli.asked_version import AskedVersion
from understudy.cli.command_errors import CommandError, reported
from understudy.cli.connection import ConnectionSettings, connected, json_option, version_option
from understudy.cli.options import settings_options
from understudy.cli.output import print_json, print_table, say
from understudy.cli.scoring_options import progress_bar

if TYPE_CHECKING:
    from understudy.clients import Version
    from understudy.evaluator.evaluation.drift import DriftReport, DriftSketches
    from understudy.evaluator.evaluation.drift_sources import Examples
    from understudy.evaluator.types import Arrays
    from understudy.experiments import Experiment

_SHOWN: Final = 20
_MOST_FEATURES: Final = 1000
_MOVED, _DRIFTED = 0.1, 0.25
"""Siddiqi's rule of thumb: below the first, no change that matters; above the second, another population."""


@click.command("drift")
@click.argument("sample", metavar="DATA")
@click.option("--against", required=True, metavar="REFERENCE", help="The reference, which the bins are made from.")
@click.option(
    "--experiment",
    metavar="EXPERIMENT",
    help="The experiment whose datasets have names: train, and those of its evaluation data.",
)
@version_option("Compare the outputs of this version too, which a server computes; by default those in request logs.")
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=100_000,
    show_default=True,
    metavar="N",
    help="Read about this many examples of each at most.",
)
@click.option(
    "--max-features",
    type=click.IntRange(1, _MOST_FEATURES),
    default=32,
    show_default=True,
    metavar="N",
    help="The most features of inputs and targets, and the most of outputs. A tensor with more values an example than "
    "are left is one feature.",
)
@json_option("Print one JSON object with the indices and distributions of all features.")
@settings_options(settings=ConnectionSettings)
def command(
    *,
    sample: str,
    against: str,
    experiment: str | None,
    version: Version | None,
    limit: int,
    max_features: int,
    as_json: bool,
    settings: ConnectionSettings,
) -> None:
    """Say how far the distributions of DATA are from those of a reference.

    \b
    understudy drift test --against train --experiment digits
    understudy drift requests/ --against test.npz --version serving

    DATA and REFERENCE are names of the experiment's datasets, .npz files, TFRecord files, request logs or saved tf.data
    folders. Inputs and targets are compared, and the model's outputs if both are request logs or with --version.
    """  # noqa: D301 - click needs this character, which keeps the line breaks below it
    from understudy.evaluator.evaluation.drift import DriftSketches
    from understudy.evaluator.evaluation.drift_sources import examples_of, limited
    from understudy.evaluator.evaluator_errors import EvaluatorError
    from understudy.experiments import ExperimentError, load_experiment

    with ExitStack() as stack:
        stack.enter_context(reported(EvaluatorError, ExperimentError))
        loaded: Experiment | None = None if experiment is None else load_experiment(experiment)
        scorer: _Scorer | None = None
        if version is not None:
            client = stack.enter_context(connected(settings))
            scorer = _Scorer(stack.enter_context(AskedVersion.of(client, version)))
        reference = DriftSketches(max_features=max_features)
        names = _add(reference, against, limited(examples_of(against, loaded), limit), scorer, None)
        found = reference.like_this()
        _add(found, sample, limited(examples_of(sample, loaded), limit), scorer, names)
    report = reference.compare(found)
    if not report.features:
        raise CommandError(f"{sample} and {against} have no tensor in common: {', '.join(report.unmatched)}")
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        _show(report, sample, against)


def _add(
    sketches: DriftSketches, origin: str, batches: Iterator[Examples], scorer: _Scorer | None, names: list[str] | None
) -> list[str]:
    """Add all examples; return the names of their inputs."""
    from understudy.evaluator.evaluation.drift import renamed_to_match

    found: list[str] = []
    done = 0
    with progress_bar(f"reading {origin}") as advance:
        for batch in batches:
            found = sorted(batch.inputs)
            sketches.add("input", batch.inputs if names is None else renamed_to_match(batch.inputs, names))
            sketches.add("target", batch.targets)
            scores = batch.scores if scorer is None else scorer.outputs_for(batch.inputs)
            sketches.add_scores(scores, {} if scorer is None else scorer.tasks)
            done += batch.count
            advance(done, None)
    if not done:
        raise CommandError(f"{origin} has no examples")
    return found


class _Scorer:
    """Asks a server for a version's outputs.

    Attributes:
        tasks: What they are for, by their names.
    """

    def __init__(self, version: AskedVersion) -> None:
        self._version = version
        self.tasks = answer_tasks(version.model)

    def outputs_for(self, inputs: Arrays) -> Arrays:
        """Return the outputs for inputs, which are cast to the model's dtypes."""
        from understudy.cli.arrays import to_predict
        from understudy.evaluator.evaluation.drift import renamed_to_match
        from understudy.experiments.example_arrays import find_inputs
        from understudy.experiments.experiment_errors import ExampleError

        takes = self._version.model.inputs
        with reported(ExampleError):
            found = find_inputs("the data", renamed_to_match(inputs, [spec.name for spec in takes]), takes)
        examples = to_predict(found, self._version.model.outputs)
        answers = [self._version.predict(each) for each in examples.inputs_by(examples.count)]
        return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}


def _show(report: DriftReport, sample: str, against: str) -> None:
    rows = [
        (
            each.name,
            each.kind,
            f"{each.psi:.4f}",
            f"{each.psi_by_chance:.4f}",
            "" if each.ks is None else f"{each.ks:.4f}",
            f"{each.count} / {each.reference_count}",
            "drifted" if each.psi > _DRIFTED else "moved" if each.psi > _MOVED else "",
        )
        for each in report.features[:_SHOWN]
    ]
    headings = ("feature", "kind", "PSI", "by chance", "KS", "values / reference", "")
    print_table(headings, rows, title=f"{sample} against {against}")
    if len(report.features) > _SHOWN:
        say(f"and {len(report.features) - _SHOWN} more features with lower indices; --json gives all of them")
    for words, names in (("only one has", report.unmatched), ("beyond --max-features", report.left_out)):
        if names:
            say(f"note: {words}: {', '.join(names)}")
    for name, columns in report.pooled.items():
        needed = len(report.features) - 1 + columns
        remedy = f"; --max-features {needed} compares each of them" if needed <= _MOST_FEATURES else ""
        say(
            f"note: the {columns} values of {name} are one feature together, in which one that moves hardly shows"
            f"{remedy}"
        )
