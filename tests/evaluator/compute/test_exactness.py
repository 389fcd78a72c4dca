"""The law of exactness: a stream's score is what `model.evaluate` gives on one device for the same batches.

Two things can make a difference: the metric, which must not, and rounding in a forward pass over slices. The models
that pass their inputs through have no rounding; they show that the metric itself is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from evaluator.compute import zoo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.evaluator.compute.slot import Slot
from understudy.evaluator.types import Batch

SIZES = (31, 1, 2, 3, 32, 1)
ROUNDING = 1e-6

Compiled = Callable[[str, int], tuple[Any, Slot]]


@pytest.fixture(scope="module")
def compiled(make_slot: Callable[..., Slot]) -> Compiled:
    """Return a model and a slot that holds it on so many replicas, each built once."""

    @functools.cache
    def model_of(name: str) -> Any:
        return zoo.KINDS[name].build()

    @functools.cache
    def slot_of(name: str, replicas: int) -> Slot:
        return make_slot(model_of(name), replicas=replicas, max_rows=16)

    return lambda name, replicas: (model_of(name), slot_of(name, replicas))


def as_batch(slot: Slot, inputs: Any, targets: Any, weights: Any = None) -> Batch:
    return Batch(
        inputs=inputs if isinstance(inputs, dict) else {slot.signature.inputs[0].name: inputs},
        targets=targets if isinstance(targets, dict) else {"targets": targets},
        sample_weights={} if weights is None else weights if isinstance(weights, dict) else {"sample_weights": weights},
    )


def score_interleaved(slot: Slot, streams: Sequence[Sequence[tuple[Any, ...]]]) -> list[Mapping[str, float]]:
    """Score several streams at once, a batch of each in turn."""
    scorer = slot.scorer()
    states = [scorer.start() for _ in streams]
    for turn in range(max(len(batches) for batches in streams)):
        for index, batches in enumerate(streams):
            if turn < len(batches):
                states[index] = scorer.update(states[index], as_batch(slot, *batches[turn]))
    return [scorer.result(state) for state in states]


def draw(kind: zoo.Kind, seed: int, sizes: Sequence[int], *, weighted: bool) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(seed)
    batches = [kind.data(rng, rows) for rows in sizes]
    return [batch if weighted and batch[2] is not None else batch[:2] for batch in batches]


def close(expected: Mapping[str, float]) -> Any:
    return pytest.approx(expected, rel=ROUNDING, abs=ROUNDING / 10, nan_ok=True)


@pytest.mark.parametrize("name", zoo.KINDS)
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_stream_scores_as_one_device_does(name: str, replicas: int, compiled: Compiled) -> None:
    kind = zoo.KINDS[name]
    model, slot = compiled(name, replicas)
    assert any(kind.whole in note for note in slot.notes) if kind.whole else not slot.notes
    for weighted in (False, True):
        batches = draw(kind, 7, SIZES, weighted=weighted)
        (result,) = score_interleaved(slot, [batches])
        assert result == close(zoo.evaluate_on_one_device(model, batches))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(zoo.KINDS)),
    replicas=st.sampled_from([2, 4]),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weighted=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_batches_score_as_one_device_does(
    compiled: Compiled, name: str, replicas: int, sizes: list[int], *, weighted: bool, seed: int
) -> None:
    model, slot = compiled(name, replicas)
    batches = draw(zoo.KINDS[name], seed, sizes, weighted=weighted)
    (result,) = score_interleaved(slot, [batches])
    assert result == close(zoo.evaluate_on_one_device(model, batches))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(zoo.PASSED_THROUGH)),
    replicas=st.integers(1, 4),
    streams=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=3),
    weighted=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_metrics_are_exact_where_the_model_does_not_round(
    compiled: Compiled, name: str, replicas: int, streams: list[list[int]], *, weighted: bool, seed: int
) -> None:
    model, slot = compiled(name, replicas)
    drawn = [draw(zoo.KINDS[name], seed + i, sizes, weighted=weighted) for i, sizes in enumerate(streams)]
    expected = [zoo.evaluate_on_one_device(model, batches) for batches in drawn]
    assert [dict(result) for result in score_interleaved(slot, drawn)] == expected
