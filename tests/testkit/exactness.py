"""The exactness guarantee, for the suite and the soak: score streams here and on one device, and compare.

The random draws depend on a seed alone, so that a failed case can be repeated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from testkit import sample_models
from understudy.compat import put_mask
from understudy.evaluator.evaluation.breakdown import Breakdown, BreakdownOptions, BrokenDown
from understudy.evaluator.model.scoring_program import alone
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.types import Batch, MetricSpec

ROUNDING = 1e-6
"""The allowed difference of floats, relative to the expected value."""

ROUNDING_OF_OUTPUTS = 1e-5
"""The allowed difference of the forward pass from one device's, relative to an output's largest value."""

SMALLEST = 0.1
"""Smaller values may deviate by the absolute amount allowed for this one."""

Rows = tuple[Any, ...]
"""``(inputs, targets)`` or ``(inputs, targets, weights)`` in the model's own structures."""


def build(kind: sample_models.Kind) -> Any:
    """Build a model whose metrics have the names that Keras gives in a process without other models.

    Scores are reported under these names, whatever else the process has built.
    """
    keras.utils.clear_session(free_memory=False)
    return kind.build()


def draw(kind: sample_models.Kind, seed: int, sizes: Sequence[int], *, weighted: bool) -> list[Rows]:
    """Draw batches of these sizes; weighted only if the kind has weights, of which with every third seed many are 0."""
    rng = np.random.default_rng(seed)
    batches = [kind.data(rng, rows) for rows in sizes]
    if not weighted or any(weights is None for _, _, weights in batches):
        return [batch[:2] for batch in batches]
    if seed % 3 == 0:
        return [
            (*batch[:2], keras.tree.map_structure(lambda leaf: _some_zero(rng, leaf), batch[2])) for batch in batches
        ]
    return batches


def _some_zero(rng: np.random.Generator, weights: Any) -> Any:
    """Return weights ``[examples, ...]`` of which those of some examples are 0."""
    kept = rng.random(len(weights)) < rng.choice([0.1, 0.5, 0.9])
    return weights * kept.reshape(-1, *(1,) * (weights.ndim - 1)).astype(weights.dtype)


def as_batch(slot: Slot, inputs: Any, targets: Any, weights: Any = None) -> Batch:
    """Name the parts of a batch as in the slot's signature."""
    names = [spec.name for spec in slot.signature.outputs]
    lone_weight = isinstance(weights, np.ndarray)
    return Batch(
        inputs=_named([spec.name for spec in slot.signature.inputs], inputs),
        targets=_named(names, targets),
        sample_weights={} if weights is None else _named(["sample_weights"] if lone_weight else names, weights),
    )


def score_interleaved(
    slot: Slot, streams: Sequence[Sequence[Rows]], metrics: Sequence[MetricSpec] = ()
) -> list[Mapping[str, float]]:
    """Score several streams concurrently, a batch of each in turn."""
    scorer = slot.scorer(metrics)
    states = [scorer.start() for _ in streams]
    for turn in range(max(len(batches) for batches in streams)):
        for index, batches in enumerate(streams):
            if turn < len(batches):
                states[index] = scorer.update(states[index], as_batch(slot, *batches[turn]))
    return [scorer.result(state) for state in states]


GROUP = "group"
"""The feature that `score_parts` slices by."""


def score_parts(
    slot: Slot,
    batches: Sequence[Rows],
    groups: Sequence[Any],
    options: BreakdownOptions,
    metrics: Sequence[MetricSpec] = (),
) -> BrokenDown:
    """Score the slices and the resamples of a stream whose examples belong to groups, ``[examples]`` for each batch."""
    scorer = slot.scorer(metrics, increments=True)
    breakdown = Breakdown(options, slot.output_tasks)
    state = scorer.start()
    for rows, group in zip(batches, groups, strict=True):
        batch = dataclasses.replace(as_batch(slot, *rows), features={GROUP: group})
        state = scorer.update(state, batch, keep_outputs=True)
        assert state.scored is not None
        breakdown.add(batch, state.scored, state.outputs)
    return breakdown.finish()


def chosen(batches: Sequence[Rows], counts: Sequence[Any]) -> list[Rows]:
    """Return the batches with each example as often as given, ``[examples]`` for each batch, and no empty ones."""
    taken = []
    for rows, times in zip(batches, counts, strict=True):
        if times.any():
            repeat = functools.partial(np.repeat, repeats=times, axis=0)
            taken.append(keras.tree.map_structure(lambda leaf, of=repeat: None if leaf is None else of(leaf), rows))
    return taken


def deviation(result: Mapping[str, float], expected: Mapping[str, float]) -> float:
    """Return the largest relative deviation of any metric; infinite if the names differ."""
    if result.keys() != expected.keys():
        return math.inf
    return max((_deviation(result[name], value) for name, value in expected.items()), default=0.0)


def reasons(slot: Slot, batches: Sequence[Rows], metrics: Sequence[MetricSpec] = ()) -> dict[str, str]:
    """Return why values of a stream's score are undefined, by name. It shares what `score_parts` traces."""
    scorer = slot.scorer(metrics, increments=True)
    state = scorer.start()
    for rows in batches:
        state = scorer.update(state, as_batch(slot, *rows))
    return scorer.undefined(state)


def defined(values: Mapping[str, float], undefined: Mapping[str, str]) -> dict[str, float]:
    """Return the values of a slice or resample without those that are undefined there, which must be absent or NaN."""
    given = {name for name in undefined if not math.isnan(values.get(name, math.nan))}
    assert not given, f"{given} have values, and {undefined} are undefined"
    return {name: value for name, value in values.items() if name not in undefined}


def rounding_of_states(model: Any) -> dict[str, float]:
    """Return by how much the metrics that a model just computed change where its states round otherwise.

    A metric that subtracts large sums, such as R2, changes by more than `ROUNDING` when these do by as much.
    """
    found = sample_models.flat_logs(model.get_metrics_result())
    allowed = dict.fromkeys(found, 0.0)
    for variable in model.metrics_variables:
        value = variable.numpy()
        if value.dtype.kind != "f":
            continue
        variable.assign(value * (1 + ROUNDING))
        changed = sample_models.flat_logs(model.get_metrics_result())
        variable.assign(value)
        for name in allowed:
            apart = abs(changed[name] - found[name])
            allowed[name] += 0.0 if math.isnan(apart) else apart
    return allowed


def score_outputs(model: Any, slot: Slot, batches: Sequence[Rows]) -> dict[str, float]:
    """Return Keras' score of the slot's own outputs, which isolates rounding in the forward pass.

    Runs the model's own loss and metrics, on one device, on the gathered outputs.
    """
    has_loss = model.loss is not None
    loss = keras.metrics.Mean()

    def step(x: Any, y: Any, weights: Any, outputs: Any, masks: Any) -> Any:
        for name, mask in masks.items():
            put_mask(outputs[name], mask)
        parts = {"x": x, "y": y, "y_pred": alone(slot._interface.outputs.unflatten(outputs)), "sample_weight": weights}
        if has_loss:
            loss.update_state(model.compute_loss(**parts, training=False), tf.shape(keras.tree.flatten(x)[0])[0])
        return model.compute_metrics(**parts)

    calls = [_step_arguments(slot, rows) for rows in batches]
    specs = (*_mapped(sample_models.open_spec, calls[0][:3]), *slot._pass.output_specs)
    run = tf.function(step, autograph=False).get_concrete_function(*specs)
    model.reset_metrics()
    loss.reset_state()
    logs: dict[str, Any] = {}
    for call in calls:
        logs = run(*_mapped(tf.convert_to_tensor, call))
    return sample_models.flat_logs({**logs, **({"loss": loss.result()} if has_loss else {})})


def output_deviation(model: Any, slot: Slot, batches: Sequence[Rows]) -> float:
    """Return the deviation of the slot's outputs from one device's, relative to their largest value."""
    return max(_apart(model, slot, rows) for rows in batches)


def _apart(model: Any, slot: Slot, rows: Rows) -> float:
    inputs, *_, outputs, _ = _step_arguments(slot, rows)
    expected = keras.tree.flatten(model(_mapped(tf.convert_to_tensor, inputs), training=False))
    scored = keras.tree.flatten(slot._interface.outputs.unflatten(outputs))
    pairs = [
        (np.asarray(one, np.float64), np.asarray(other, np.float64))
        for one, other in zip(scored, expected, strict=True)
    ]
    return max(float(np.max(np.abs(one - other)) / max(np.max(np.abs(other)), 1e-30)) for one, other in pairs)


def _step_arguments(slot: Slot, rows: Rows) -> tuple[Any, ...]:
    inputs, targets, *weights = keras.tree.lists_to_tuples(rows)
    outputs, masks = slot._pass(as_batch(slot, *rows).inputs)
    numpy_outputs, numpy_masks = ({name: np.asarray(t) for name, t in part.items()} for part in (outputs, masks))
    return inputs, targets, weights[0] if weights else None, numpy_outputs, numpy_masks


def _mapped(function: Any, structure: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), structure)


def _named(names: Sequence[str], structure: Any) -> dict[str, Any]:
    return dict(zip(names, keras.tree.flatten(structure), strict=True))


def _deviation(value: float, expected: float) -> float:
    if value == expected or (math.isnan(value) and math.isnan(expected)):
        return 0.0
    apart = abs(value - expected) / max(abs(expected), SMALLEST)
    return math.inf if math.isnan(apart) else apart
