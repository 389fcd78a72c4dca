"""An error inside a step becomes a sentence: what TensorFlow said, the user's own line, and what helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from testkit.training_harness import Linear, Noisy, as_it_is, run
from understudy.trainer.step_errors import step_watched
from understudy.trainer.trainer_errors import StepError

pytestmark = pytest.mark.usefixtures("split_cpu")

LOOK = "; look at what training_data() gives, and at the loss and the layers of the model"


class OtherLabels(Noisy):
    def training_data(self) -> tf.data.Dataset:
        return super().training_data().map(as_it_is(lambda x, y: (x, y + 5)))


class Interrupted(Linear):
    def training_data(self) -> tf.data.Dataset:
        spec = tuple(tf.TensorSpec(shape) for shape in ((8,), (1,)))
        return tf.data.Dataset.from_generator(examples, output_signature=spec).apply(
            tf.data.experimental.assert_cardinality(400)
        )


def examples() -> Iterator[Any]:
    for _ in range(300):
        yield np.zeros(8, np.float32), np.zeros(1, np.float32)
    raise OSError("the share is gone")


def test_a_label_outside_the_classes_is_told(tmp_path: Path) -> None:
    with pytest.raises(StepError) as raised:
        run(OtherLabels(), tmp_path)
    said = str(raised.value)
    assert said.startswith("a step after step 0 failed: Received a label value of 7 which is outside the valid range")
    assert said.endswith(LOOK)
    assert "line" not in said
    assert len(said) < 400


def test_what_a_generator_raises_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(StepError) as raised:
        run(Interrupted(), tmp_path, cache=False)
    line = examples.__code__.co_firstlineno + 3
    assert str(raised.value) == (
        f"a step after step 0 failed: OSError: the share is gone ({__file__}, line {line}){LOOK}"
    )


def test_memory_that_lacks_has_a_remedy_of_its_own() -> None:
    with (
        pytest.raises(StepError, match="after step 30 failed: OOM when allocating; lower global_batch_size"),
        step_watched(30),
    ):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")


@pytest.mark.parametrize(
    "error",
    [
        lambda: tf.errors.InvalidArgumentError(None, None, "Collective ops is aborted by: a task died"),
        lambda: tf.errors.UnavailableError(None, None, "connection reset"),
        lambda: KeyError("a defect"),
    ],
)
def test_what_is_not_of_the_data_or_the_model_is_passed_on(error: Callable[[], Exception]) -> None:
    raised = error()
    with pytest.raises(type(raised)) as caught, step_watched(3):
        raise raised
    assert caught.value is raised
