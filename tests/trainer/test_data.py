from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from understudy.trainer import DataError
from understudy.trainer.batches import global_batches
from understudy.trainer.data import DataPlan, plan_data
from understudy.trainer.loop import call_sizes


def numbers(count: int = 10) -> tf.data.Dataset:
    return tf.data.Dataset.range(count).map(lambda x: (x, x))


def plan(dataset: tf.data.Dataset, **values: Any) -> DataPlan:
    defaults = {"global_batch_size": 4, "replicas": 1, "seed": 3, "shuffle_buffer": None, "cache": True}
    return plan_data(dataset, **{**defaults, "keep_remainder": False, **values})


def take(dataset: tf.data.Dataset, steps: int) -> list[list[int]]:
    return [batch[0].numpy().tolist() for batch in islice(dataset, steps)]


def test_an_epoch_holds_each_example_at_most_once_and_only_whole_batches() -> None:
    data = numbers()
    epoch = take(global_batches(data, plan(data), first_step=0), 2)
    assert [len(batch) for batch in epoch] == [4, 4]
    assert len(set(epoch[0] + epoch[1])) == 8


def test_a_remainder_that_is_kept_begins_the_next_epoch() -> None:
    data = numbers()
    batches = take(global_batches(data, plan(data, keep_remainder=True), first_step=0), 5)
    assert [len(batch) for batch in batches] == [4] * 5
    seen = [number for batch in batches for number in batch]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))


def test_epochs_are_shuffled_differently() -> None:
    data = numbers()
    batches = take(global_batches(data, plan(data), first_step=0), 4)
    assert batches[:2] != batches[2:]


def test_seeds_shuffle_differently() -> None:
    data = numbers()
    first = take(global_batches(data, plan(data), first_step=0), 2)
    assert first != take(global_batches(data, plan(data, seed=4), first_step=0), 2)


@pytest.mark.parametrize("first_step", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("shuffle_buffer", [None, 3])
@pytest.mark.parametrize("keep_remainder", [False, True])
def test_what_is_in_a_step_depends_on_the_step_alone(
    first_step: int,
    shuffle_buffer: int | None,
    keep_remainder: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    data = numbers()
    cut = plan(data, shuffle_buffer=shuffle_buffer, keep_remainder=keep_remainder)
    whole = take(global_batches(data, cut, first_step=0), 7)
    tf.random.set_seed(first_step + 99)
    assert take(global_batches(data, cut, first_step=first_step), 7 - first_step) == whole[first_step:]


@pytest.mark.parametrize("cache", [True, False])
def test_the_cache_spares_reading_the_data_again(cache: bool) -> None:  # noqa: FBT001 - a parameter of the test
    reads: list[int] = []

    def read(x: Any) -> Any:
        reads.append(int(x))
        return x

    data = tf.data.Dataset.range(8).map(lambda x: (tf.ensure_shape(tf.numpy_function(read, [x], tf.int64), ()), x))
    # The pipeline reads ahead, so that the exact number is known only with the cache.
    take(global_batches(data, plan(data, cache=cache), first_step=0), 6)
    assert (len(reads) == 8) == cache


def test_the_shapes_of_batches_are_known() -> None:
    spec = global_batches(numbers(), plan(numbers()), first_step=0).element_spec
    assert [tuple(tensor.shape) for tensor in spec] == [(4,), (4,)]


@pytest.mark.parametrize(
    ("dataset", "values", "message"),
    [
        (lambda: numbers(3), {}, "3 examples, fewer than one global batch of 4"),
        (numbers, {"replicas": 3}, "4, which 3 replicas cannot share evenly; choose 3 or 6"),
        (numbers, {"replicas": 8}, "choose 8, or"),
        (lambda: numbers().repeat(), {}, "repeats without end"),
        (lambda: numbers().filter(lambda x, _: x > 0), {}, "does not know its length"),
        (lambda: tf.data.Dataset.range(10), {}, r"expected \(x, y\)"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(
    dataset: Callable[[], Any], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        plan(dataset(), **values)


def test_calls_also_end_where_a_profile_begins_and_ends() -> None:
    sizes = call_sizes(first_step=1, steps=12, checkpoint_every=10, steps_per_call=4, also_at=(2, 7))
    assert list(sizes) == [1, 4, 1, 3, 2]


@pytest.mark.parametrize(
    ("first_step", "steps", "every", "per_call", "expected"),
    [
        (0, 10, 5, 2, [2, 2, 1, 2, 2, 1]),
        (0, 7, 100, 3, [3, 3, 1]),
        (5, 12, 5, 100, [5, 2]),
        (3, 12, 5, 4, [2, 4, 1, 2]),
        (10, 10, 5, 2, []),
        (11, 10, 5, 2, []),
    ],
)
def test_calls_end_where_a_checkpoint_is_due(
    first_step: int, steps: int, every: int, per_call: int, expected: list[int]
) -> None:
    sizes = call_sizes(first_step=first_step, steps=steps, checkpoint_every=every, steps_per_call=per_call)
    assert list(sizes) == expected
    assert np.sum(expected) == max(0, steps - first_step)
