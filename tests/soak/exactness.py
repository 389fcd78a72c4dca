"""Randomized exactness: streams of batches score exactly as `model.evaluate` scores them on one device.

Each case draws the model (of the tests' sample models), 1 to 8 replicas, compiled or named metrics, the number of
concurrent streams, the number and sizes of their batches, the examples, the targets and the weights. In some cases the
examples of a stream belong to slices, and are resampled: each slice and each resample must score as `model.evaluate`
scores its examples alone. Cases are grouped into chapters that share a model, its replicas and its metrics, since those
have to be built and traced. In the middle of some chapters the slot is dropped and its file loaded again, as by a
process that restarts: the stream before the restart must score, sliced and resampled, bit for bit as it did.

What to expect comes from `model.evaluate` in every tenth case, and where a chapter has the first stream with or without
weights. The other cases call the steps that it takes, without its datasets, which take longer than the steps of these
small models; both ways must give the same bits in those of every tenth case.

Models that pass their inputs through do not round, and must agree to the last digit. Others must agree to 1e-6 of the
value. Slices and resamples are summed with more digits than Keras sums with, so there it is the states of the metrics
that must agree to 1e-6. For a larger deviation the outputs must equal one device's but for rounding, and the score must
be what Keras computes from these very outputs. This separates rounding in the forward pass (an example may cross a
threshold) from an error.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from soak.trial import Trial

if TYPE_CHECKING:
    from testkit.exactness import Rows
    from understudy.evaluator.evaluation.breakdown import BrokenDown
    from understudy.evaluator.model.slot import Slot
    from understudy.evaluator.types import MetricSpec

CASES = 20_000
CASES_OF_CHAPTER = 100
CASES_BY_EVALUATE = 10
"""One case of so many is compared with `model.evaluate` itself."""
DESCRIBED = 10
MAX_REPLICAS = 8
MAX_BATCHES = 5
MAX_STREAMS = 4
MAX_ROWS_OF_PASS = 32
PARTED = 0.3
"""The share of the cases that have slices and resamples."""
RESTARTED = 0.3
"""The share of the chapters with a restart."""
RESAMPLES = 2
COUPLED = "coupled examples"
"""The model whose slices are not scored like their examples alone, as these influence each other within a batch."""
SIZES = (1, 1, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 32, 37, 41, 64, 67, 96, 97)
"""One example, primes, and sizes that divide evenly; the largest run in pieces."""


def run(trial: Trial) -> None:
    """Try as many cases as requested, chapter by chapter, resuming an interrupted trial."""
    count = trial.count(CASES)
    _lay_out_devices()
    tally = Tally(**trial.load_state())
    while tally.cases < count:
        for _ in _cases_of(trial.seed, tally.chapters, count - tally.cases, tally):
            pass
        tally.chapters += 1
        trial.save_state(vars(tally))
        trial.report(held=not tally.failed, **vars(tally), asked_for=count)
    trial.finish()


@dataclass
class Tally:
    """The results of the cases so far. Deviations are relative, and the largest of any metric.

    Attributes:
        cases: Number of cases.
        chapters: Number of chapters.
        streams: Number of streams.
        evaluated: Number of streams that `model.evaluate` scored, and the steps that it takes scored to the same bits.
        passed_through: Number of cases whose model does not round.
        largest_deviation_passed_through: Must be 0.
        largest_deviation: Of the other models.
        beyond_rounding: Number of cases that deviate more than 1e-6, as outputs round otherwise in the forward pass.
        largest_deviation_beyond_rounding: The largest of these.
        largest_deviation_of_outputs: Of their outputs from one device's, relative to the largest value of each.
        largest_deviation_of_scoring: Of these from Keras's score of the same outputs.
        parts: Number of slices and resamples.
        weighted_parts: Number of these with sample weights.
        undefined: Number of values that are undefined in them, each with the reason of a score of its examples.
        parted_models: The models that had slices and resamples, each with the number of them.
        largest_deviation_of_parts: Of all parts, of models that do not round.
        parts_of_rounded_states: Parts that deviate more than 1e-6, but no more than if the states of the metrics had
            rounded otherwise by 1e-6: those of sums that nearly cancel.
        parts_beyond_rounding: Parts of other models that deviate more than 1e-6, as outputs round otherwise.
        restarts: Number of restarts.
        failed: Number of streams, slices and resamples that broke the guarantee.
        failures: Descriptions of the first of them.
    """

    cases: int = 0
    chapters: int = 0
    streams: int = 0
    evaluated: int = 0
    passed_through: int = 0
    largest_deviation_passed_through: float = 0.0
    largest_deviation: float = 0.0
    beyond_rounding: int = 0
    largest_deviation_beyond_rounding: float = 0.0
    largest_deviation_of_outputs: float = 0.0
    largest_deviation_of_scoring: float = 0.0
    parts: int = 0
    weighted_parts: int = 0
    undefined: int = 0
    parted_models: dict[str, int] = field(default_factory=dict)
    largest_deviation_of_parts: float = 0.0
    parts_of_rounded_states: int = 0
    parts_beyond_rounding: int = 0
    restarts: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Chapter:
    """The common properties of one chapter's cases.

    ``evaluated`` holds the numbers of parts of a batch, two or with weights three, that `model.evaluate` has traced.
    """

    name: str
    replicas: int
    metrics: tuple[MetricSpec, ...]
    model: Any
    load: Callable[[], Slot]
    slot: Slot
    evaluated: set[int] = field(default_factory=set)


def _cases_of(seed: int, number: int, most: int, tally: Tally) -> Iterator[None]:
    """Try the cases of one chapter."""
    import keras

    rng = np.random.default_rng([seed, number])
    with tempfile.TemporaryDirectory() as folder:
        chapter = _draw_chapter(rng, Path(folder))
        cases = min(most, CASES_OF_CHAPTER)
        restarts_at = cases // 2 if rng.random() < RESTARTED else cases
        for case in range(cases):
            title = f"chapter {number}, case {case}"
            if case == restarts_at:
                _restart(chapter, np.random.default_rng([seed, number, case, 1]), title, tally)
            by_evaluate = case % CASES_BY_EVALUATE == 0
            _try(chapter, np.random.default_rng([seed, number, case]), title, tally, by_evaluate=by_evaluate)
            yield
    del chapter
    keras.backend.clear_session()
    gc.collect()


def _draw_chapter(rng: np.random.Generator, folder: Path) -> Chapter:
    import keras
    import tensorflow as tf

    from testkit import exactness, more_sample_models
    from understudy.evaluator.model.slot import Slot

    name = str(rng.choice(sorted(more_sample_models.KINDS)))
    replicas = int(rng.integers(1, MAX_REPLICAS + 1))
    keras.utils.set_random_seed(int(rng.integers(2**31)))
    model = exactness.build(more_sample_models.KINDS[name])
    model.save(folder / "model.keras")
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])

    def load() -> Slot:
        return Slot(strategy, folder / "model.keras", max_batch_size=MAX_ROWS_OF_PASS)

    metrics = _draw_metrics(rng, more_sample_models.NAMED.get(name, ()))
    if metrics:
        more_sample_models.compile_with(model, metrics)
    return Chapter(name=name, replicas=replicas, metrics=metrics, model=model, load=load, slot=load())


def _draw_metrics(rng: np.random.Generator, known: Sequence[MetricSpec]) -> tuple[MetricSpec, ...]:
    """Draw some of the applicable metrics, or none, which selects the compiled ones."""
    if not known or rng.random() < 0.4:
        return ()
    chosen = rng.choice(len(known), size=int(rng.integers(1, 5)), replace=False)
    return tuple(known[index] for index in chosen)


def _try(chapter: Chapter, rng: np.random.Generator, title: str, tally: Tally, *, by_evaluate: bool) -> None:
    """Score some streams concurrently, and each of them on one device."""
    from testkit import exactness, more_sample_models

    weighted = bool(rng.random() < 0.5)
    kind = more_sample_models.KINDS[chapter.name]
    streams = [
        exactness.draw(kind, int(rng.integers(2**32)), _draw_sizes(rng), weighted=weighted)
        for _ in range(rng.integers(1, MAX_STREAMS + 1))
    ]
    results = exactness.score_interleaved(chapter.slot, streams, chapter.metrics)
    tally.cases += 1
    tally.streams += len(streams)
    tally.passed_through += chapter.name in more_sample_models.PASSED_THROUGH
    problems = []
    for batches, result in zip(streams, results, strict=True):
        expected, problem = _expected(chapter, batches, tally, by_evaluate=by_evaluate)
        problems += [problem, _judge(chapter, batches, result, expected, tally)]
    if rng.random() < PARTED and chapter.name != COUPLED:
        problems += _try_parts(chapter, rng, streams[0], tally)
    for problem in filter(None, problems):
        _note_failure(tally, f"{title}: {chapter.name} on {chapter.replicas}: {problem}")


def _expected(
    chapter: Chapter, batches: Sequence[Rows], tally: Tally, *, by_evaluate: bool
) -> tuple[Mapping[str, float], str]:
    """Return the score of a stream on one device, and what is wrong with the two ways to get it."""
    from testkit.sample_models import evaluate_on_one_device, step_on_one_device

    parts = len(batches[0])
    if not by_evaluate and parts in chapter.evaluated:
        return step_on_one_device(chapter.model, batches), ""
    chapter.evaluated.add(parts)
    expected, stepped = evaluate_on_one_device(chapter.model, batches), step_on_one_device(chapter.model, batches)
    tally.evaluated += 1
    same = _bits(expected) == _bits(stepped)
    return expected, "" if same else f"model.evaluate gives {expected}, its steps alone give {stepped}"


def _bits(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return values that are equal if all bits are, NaN included."""
    return {name: value.hex() for name, value in metrics.items()}


def _note_failure(tally: Tally, text: str) -> None:
    tally.failed += 1
    tally.failures = [*tally.failures, text][:DESCRIBED]


def _try_parts(chapter: Chapter, rng: np.random.Generator, batches: Sequence[Rows], tally: Tally) -> Iterator[str]:
    """Score the slices and two resamples of a stream, and yield what is wrong with them.

    The stream itself has been scored on one device, so its step is traced.
    """
    from testkit import exactness
    from testkit.sample_models import step_on_one_device

    groups, found = _score_parts(chapter, rng, batches)
    for part in _parts_of(found, groups):
        taken = exactness.chosen(batches, part.counts)
        if not taken:
            continue
        everything = step_on_one_device(chapter.model, taken)
        undefined = exactness.reasons(chapter.slot, taken, chapter.metrics)
        tally.parts += 1
        tally.undefined += len(undefined)
        tally.weighted_parts += len(batches[0]) > len(_UNWEIGHTED)
        tally.parted_models[chapter.name] = tally.parted_models.get(chapter.name, 0) + 1
        try:
            metrics = exactness.defined(part.values, undefined)
        except AssertionError as error:
            yield f"{part.name}: {error}"
            continue
        if problem := _lacking(part, metrics, everything, undefined, found.notes):
            yield f"{part.name}: {problem}"
        elif not _agrees(chapter, taken, metrics, _only(metrics, everything), tally):
            yield f"{part.name}: {metrics} for {_only(metrics, everything)}"


class _Part(NamedTuple):
    """A slice, or a resample of all examples or of a slice, whose reasons are None.

    ``counts`` are how often each example of each batch is taken.
    """

    name: str
    values: Mapping[str, float]
    undefined: Mapping[str, str] | None
    counts: list[Any]


def _parts_of(found: BrokenDown, groups: Sequence[Any]) -> Iterator[_Part]:
    """Yield the slices, and the resamples of all examples and of the first slice."""
    from understudy.evaluator.evaluation.bootstrap import draw
    from understudy.evaluator.evaluation.breakdown import SEED

    for part in found.slices:
        members = [(group == int(part.name[-1])).astype(int) for group in groups]
        yield _Part(part.name, part.metrics, part.undefined, members)
    ends = np.cumsum([len(group) for group in groups])
    for number, counts in enumerate(draw(SEED, RESAMPLES, 0, int(ends[-1]))):
        for name in dict.fromkeys(("", *(f"[{part.name}]" for part in found.slices[:1]))):
            values = {
                metric.removesuffix(name): float(values[number])
                for metric, values in found.resampled.items()
                if metric.endswith(name) and (name or "[" not in metric)
            }
            held = [group == int(name[-2]) if name else np.ones_like(group) for group in groups]
            drawn = [each * own for each, own in zip(np.split(counts, ends[:-1]), held, strict=True)]
            yield _Part(f"resample {number}{name}", values, None, drawn)


def _lacking(
    part: _Part,
    metrics: Mapping[str, float],
    expected: Mapping[str, float],
    undefined: Mapping[str, str],
    notes: Sequence[str],
) -> str:
    """Return what a part lacks without a note, or what is undefined for another reason; empty if nothing."""
    missing = expected.keys() - metrics.keys() - undefined.keys()
    if missing and not any("no intervals" in note for note in notes):
        return f"{sorted(missing)} are missing; the notes are {notes}"
    if part.undefined is not None and part.undefined != {name: undefined.get(name) for name in part.undefined}:
        return f"{part.undefined} are undefined for {undefined}"
    if part.undefined is not None and undefined.keys() - part.undefined.keys() - missing:
        return f"{part.undefined} are undefined for {undefined}"
    return ""


def _agrees(
    chapter: Chapter,
    taken: Sequence[Rows],
    metrics: Mapping[str, float],
    expected: Mapping[str, float],
    tally: Tally,
) -> bool:
    """Return whether the metrics of a part are those of its examples alone, but for rounding."""
    from testkit import exactness, more_sample_models

    apart = exactness.deviation(metrics, expected)
    passes_through = chapter.name in more_sample_models.PASSED_THROUGH
    if passes_through:
        tally.largest_deviation_of_parts = max(tally.largest_deviation_of_parts, apart)
    if apart <= exactness.ROUNDING:
        return True
    allowed = exactness.rounding_of_states(chapter.model)
    if all(abs(value - expected[metric]) <= allowed.get(metric, 0.0) for metric, value in metrics.items()):
        tally.parts_of_rounded_states += 1
        return True
    if passes_through:
        return False
    tally.parts_beyond_rounding += 1
    scored = _only(metrics, exactness.score_outputs(chapter.model, chapter.slot, taken))
    rounds = exactness.output_deviation(chapter.model, chapter.slot, taken)
    return rounds <= exactness.ROUNDING_OF_OUTPUTS and exactness.deviation(metrics, scored) <= exactness.ROUNDING


_UNWEIGHTED = ("inputs", "targets")


def _only(names: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
    return {name: values[name] for name in names}


def _score_parts(chapter: Chapter, rng: np.random.Generator, batches: Sequence[Rows]) -> tuple[list[Any], BrokenDown]:
    """Return the groups of a stream's examples, and the score of its slices and resamples."""
    import keras

    from testkit import exactness
    from understudy.evaluator.evaluation.breakdown import BreakdownOptions
    from understudy.evaluator.evaluation.slices import parse_slices

    groups = [rng.integers(0, 3, len(keras.tree.flatten(rows[0])[0])) for rows in batches]
    options = BreakdownOptions(slices=parse_slices([exactness.GROUP]), resamples=RESAMPLES)
    return groups, exactness.score_parts(chapter.slot, batches, groups, options, chapter.metrics)


def _restart(chapter: Chapter, rng: np.random.Generator, title: str, tally: Tally) -> None:
    """Load the chapter's model again, and compare the score of a stream before and after that."""
    from testkit import exactness, more_sample_models

    kind = more_sample_models.KINDS[chapter.name]
    batches = exactness.draw(kind, int(rng.integers(2**32)), _draw_sizes(rng), weighted=bool(rng.random() < 0.5))
    seed = int(rng.integers(2**32))

    def scored() -> str:
        (result,) = exactness.score_interleaved(chapter.slot, [batches], chapter.metrics)
        _, found = _score_parts(chapter, np.random.default_rng(seed), batches)
        resampled = {name: values.tolist() for name, values in found.resampled.items()}
        return repr((dict(result), found.slices, found.intervals, resampled))

    before = scored()
    chapter.slot = chapter.load()
    after = scored()
    tally.restarts += 1
    if before != after:
        _note_failure(tally, f"{title}: {chapter.name} on {chapter.replicas}, restarted: {after} after {before}")


def _draw_sizes(rng: np.random.Generator) -> list[int]:
    return [int(size) for size in rng.choice(SIZES, rng.integers(1, MAX_BATCHES + 1))]


def _judge(
    chapter: Chapter, batches: Sequence[Rows], result: Mapping[str, float], expected: Mapping[str, float], tally: Tally
) -> str:
    """Return the problem with a result, or nothing if it is correct."""
    from testkit import exactness, more_sample_models

    apart = exactness.deviation(result, expected)
    problem = f"{dict(result)} for {dict(expected)}"
    if chapter.name in more_sample_models.PASSED_THROUGH:
        tally.largest_deviation_passed_through = max(tally.largest_deviation_passed_through, apart)
        return problem if apart else ""
    if apart <= exactness.ROUNDING:
        tally.largest_deviation = max(tally.largest_deviation, apart)
        return ""
    of_scoring = exactness.deviation(result, exactness.score_outputs(chapter.model, chapter.slot, batches))
    of_outputs = exactness.output_deviation(chapter.model, chapter.slot, batches)
    if of_scoring > exactness.ROUNDING or of_outputs > exactness.ROUNDING_OF_OUTPUTS:
        return f"{problem}; the outputs are {of_outputs} apart, their scores {of_scoring}"
    tally.beyond_rounding += 1
    tally.largest_deviation_beyond_rounding = max(tally.largest_deviation_beyond_rounding, apart)
    tally.largest_deviation_of_outputs = max(tally.largest_deviation_of_outputs, of_outputs)
    tally.largest_deviation_of_scoring = max(tally.largest_deviation_of_scoring, of_scoring)
    return ""


def _lay_out_devices() -> None:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * MAX_REPLICAS)
