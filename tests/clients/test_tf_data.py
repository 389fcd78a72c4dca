"""A tf.data.Dataset is an iterable of batches like any other."""

from __future__ import annotations

import numpy as np
import pytest

from understudy.clients import Client

pytestmark = pytest.mark.usefixtures("logical_cpus")  # whoever starts TensorFlow in this process lays out its devices


def test_a_dataset_of_tensors_is_scored(client: Client) -> None:
    import tensorflow as tf

    x = np.arange(40, dtype=np.float32).reshape(10, 4)
    lone = tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(4)
    named = tf.data.Dataset.from_tensor_slices(({"image": x}, 2 * x + 1, np.ones(10, np.float32))).batch(4)

    assert client.evaluate(lone).metrics == {"loss": 0.0}
    result = client.evaluate(named)

    assert (result.examples, result.batches, result.metrics) == (10, 3, {"loss": 1.0})


def test_eager_tensors_of_text_are_predicted(client: Client) -> None:
    import tensorflow as tf

    assert client.predict({"image": tf.constant(["a", "b"])}).output.tolist() == [b"aa", b"bb"]
