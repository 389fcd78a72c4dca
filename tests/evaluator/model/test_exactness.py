"""The exactness guarantee: a stream's score is what `model.evaluate` gives on one device for the same batches.

Two things can make a difference: the metric, which must not, and rounding in a forward pass over slices. The models
that pass their inputs through have no rounding; they show that the metric itself is exact.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testkit import exactness, more_sample_models, sample_models
from testkit.preloading import preloaded
from understudy.evaluator.evaluation.bootstrap import draw
from understudy.evaluator.evaluation.breakdown import SEED, BreakdownOptions
from understudy.evaluator.evaluation.slices import parse_slices
from understudy.evaluator.model.slot import Slot

ROOT = Path(__file__).parents[3]
SIZES = (31, 1, 2, 3, 32, 1)
REPLICAS = 3
MAX_ROWS = 6
SOAKED = 2

Compiled = Callable[[str, int], tuple[Any, Slot]]

pytestmark = pytest.mark.timeout(400)
"""A machine that does much else at the same time needs longer than most tests may take."""

drawn = settings(
    max_examples=5,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def compiled(make_slot: Callable[..., Slot]) -> Compiled:
    """Return a model and a slot that holds it on so many replicas, each built once."""

    @functools.cache
    def model_of(name: str) -> Any:
        return exactness.build(more_sample_models.KINDS[name])

    @functools.cache
    def slot_of(name: str, replicas: int) -> Slot:
        return make_slot(model_of(name), replicas=replicas, max_batch_size=MAX_ROWS)

    return lambda name, replicas: (model_of(name), slot_of(name, replicas))


@pytest.mark.parametrize("name", more_sample_models.KINDS)
def test_a_stream_scores_as_one_device_does(name: str, compiled: Compiled) -> None:
    kind = more_sample_models.KINDS[name]
    model, slot = compiled(name, REPLICAS)
    assert any(kind.whole in note for note in slot.notes) if kind.whole else not slot.notes
    for weighted in (False, True):
        batches = exactness.draw(kind, 7, SIZES, weighted=weighted)
        if weighted and len(batches[0]) == 2:
            continue  # a kind without weights
        (result,) = exactness.score_interleaved(slot, [batches])
        expected = sample_models.evaluate_on_one_device(model, batches)
        assert exactness.deviation(result, expected) <= exactness.ROUNDING, (result, expected)


@drawn
@given(
    name=st.sampled_from(sorted(more_sample_models.KINDS)),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    weighted=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_batches_score_as_one_device_does(
    compiled: Compiled, name: str, sizes: list[int], *, weighted: bool, seed: int
) -> None:
    model, slot = compiled(name, REPLICAS)
    batches = exactness.draw(more_sample_models.KINDS[name], seed, sizes, weighted=weighted)
    (result,) = exactness.score_interleaved(slot, [batches])
    expected = sample_models.evaluate_on_one_device(model, batches)
    if (
        exactness.deviation(result, expected) > exactness.ROUNDING
    ):  # then rounding in the forward pass alone must have made it
        assert exactness.output_deviation(model, slot, batches) <= exactness.ROUNDING_OF_OUTPUTS
        assert exactness.deviation(result, exactness.score_outputs(model, slot, batches)) <= exactness.ROUNDING, (
            result,
            expected,
        )


@drawn
@given(
    name=st.sampled_from(sorted(more_sample_models.PASSED_THROUGH)),
    replicas=st.sampled_from([1, REPLICAS]),
    streams=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=2),
    weighted=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_metrics_are_exact_where_the_model_does_not_round(
    compiled: Compiled, name: str, replicas: int, streams: list[list[int]], *, weighted: bool, seed: int
) -> None:
    model, slot = compiled(name, replicas)
    batches_of = [
        exactness.draw(more_sample_models.KINDS[name], seed + i, sizes, weighted=weighted)
        for i, sizes in enumerate(streams)
    ]
    expected = [sample_models.evaluate_on_one_device(model, batches) for batches in batches_of]
    assert [dict(result) for result in exactness.score_interleaved(slot, batches_of)] == expected


@pytest.mark.parametrize(
    ("name", "sizes", "weighted", "seed"),
    [("binary metrics", [15, 1, 34], True, 5), ("many labels", [15, 39, 34], False, 124611)],
)
def test_slices_and_resamples_score_as_their_examples_alone(
    compiled: Compiled, name: str, sizes: list[int], *, weighted: bool, seed: int
) -> None:
    model, slot = compiled(name, REPLICAS)
    batches = exactness.draw(more_sample_models.KINDS[name], seed, sizes, weighted=weighted)
    rng = np.random.default_rng(seed)
    groups = [rng.integers(0, 3, size) for size in sizes]
    options = BreakdownOptions(slices=parse_slices([exactness.GROUP]), resamples=20)
    found = exactness.score_parts(slot, batches, groups, options)
    assert sum(part.examples for part in found.slices) == sum(sizes)
    part = found.slices[0]
    members = [(group == int(part.name.partition("=")[2])).astype(int) for group in groups]
    examples = exactness.chosen(batches, members)
    assert part.undefined == exactness.reasons(slot, examples)
    expected = sample_models.evaluate_on_one_device(model, examples)
    missing = expected.keys() - part.metrics.keys() - part.undefined.keys()
    assert missing <= ({"spread", "loss"} if weighted else {"spread"}), found.notes
    scored = {metric: expected[metric] for metric in part.metrics}
    assert exactness.deviation(part.metrics, scored) <= exactness.ROUNDING, (part.metrics, scored)
    draws = np.split(draw(SEED, 20, 0, sum(sizes))[0], np.cumsum(sizes)[:-1])
    examples = exactness.chosen(batches, draws)
    expected = sample_models.evaluate_on_one_device(model, examples)
    resampled = {metric: float(found.resampled[metric][0]) for metric in part.metrics}
    defined = exactness.defined(resampled, exactness.reasons(slot, examples))
    assert exactness.deviation(defined, {metric: expected[metric] for metric in defined}) <= exactness.ROUNDING


@pytest.mark.parametrize("name", [name for name, kind in more_sample_models.KINDS.items() if not kind.whole])
def test_the_gathered_outputs_are_one_devices_but_for_rounding(name: str, compiled: Compiled) -> None:
    model, slot = compiled(name, REPLICAS)
    batches = exactness.draw(more_sample_models.KINDS[name], 11, SIZES, weighted=False)
    assert exactness.output_deviation(model, slot, batches) <= exactness.ROUNDING_OF_OUTPUTS


def test_keras_scores_the_gathered_outputs_as_they_were_scored(compiled: Compiled) -> None:
    for name in ("masked sequences", "outputs in a list", "functions of its own"):
        model, slot = compiled(name, REPLICAS)
        batches = exactness.draw(more_sample_models.KINDS[name], 3, SIZES, weighted=True)
        (result,) = exactness.score_interleaved(slot, [batches])
        assert exactness.deviation(result, exactness.score_outputs(model, slot, batches)) <= exactness.ROUNDING


def test_metrics_that_are_named_score_as_if_they_were_compiled(compiled: Compiled) -> None:
    for name in ("binary metrics", "value metrics"):
        _, slot = compiled(name, REPLICAS)
        model = exactness.build(more_sample_models.KINDS[name])
        metrics = more_sample_models.NAMED[name]
        more_sample_models.compile_with(model, metrics)
        batches = exactness.draw(more_sample_models.KINDS[name], 5, SIZES, weighted=False)
        (result,) = exactness.score_interleaved(slot, [batches], metrics)
        assert dict(result) == sample_models.evaluate_on_one_device(model, batches)


def test_a_deviation_is_told() -> None:
    assert exactness.deviation({"a": 1.0, "b": np.nan}, {"a": 1.0, "b": np.nan}) == 0.0
    assert exactness.deviation({"a": 1.0}, {"b": 1.0}) == np.inf
    assert exactness.deviation({"a": np.nan}, {"a": 1.0}) == np.inf
    assert exactness.deviation({"a": 2.0002}, {"a": 2.0}) == pytest.approx(1e-4)


def test_the_soak_draws_cases_on_up_to_eight_replicas(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "soak", "exactness", "--count", str(SOAKED), "--seed", "4"]
    command += ["--work", str(tmp_path / "work"), "--results", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **preloaded()}, check=True, capture_output=True, timeout=300)
    result = json.loads((tmp_path / "soak_exactness.json").read_bytes())
    assert result["held"]
    assert result["cases"] == SOAKED
