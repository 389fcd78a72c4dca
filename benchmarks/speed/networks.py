"""Networks such as users serve. Each function takes ``keras.layers`` and an input of any number of examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

VOCABULARY = 1000
_CLASSES = 10
_WORDS = [f"word{number}" for number in range(VOCABULARY)]
_WIDTH = 64


def texts(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.object_]:
    """Return a word for each id, as bytes; a text of twenty words where there is one id for each example."""
    words = 20 if ids.shape[1:] == (1,) else 1
    found = [" ".join(_WORDS[(number + place) % VOCABULARY] for place in range(words)).encode() for number in ids.flat]
    return np.array(found, dtype=object).reshape(ids.shape)


def mobilenet(_layers: Any, x: Any) -> Any:
    """Float images ``[rows, 96, 96, 3]``."""
    import keras

    return keras.applications.MobileNetV2((96, 96, 3), alpha=0.5, weights=None, classes=_CLASSES)(x)


def text(layers: Any, x: Any) -> Any:
    """Strings ``[rows, 1]``, of which words are split and looked up."""
    tokens = layers.TextVectorization(output_sequence_length=32, vocabulary=_WORDS)(x)
    y = layers.Embedding(VOCABULARY + 2, _WIDTH)(tokens)
    y = layers.Conv1D(_WIDTH, 3, activation="relu")(y)
    return _classes(layers, layers.GlobalMaxPooling1D()(y))


def transformer(layers: Any, x: Any) -> Any:
    """Ids ``[rows, any]``."""
    y = layers.Embedding(VOCABULARY, _WIDTH)(x)
    for _ in range(2):
        y = layers.LayerNormalization()(y + layers.MultiHeadAttention(4, _WIDTH // 4)(y, y))
        wide = layers.Dense(2 * _WIDTH, activation="relu")(y)
        y = layers.LayerNormalization()(y + layers.Dense(_WIDTH)(wide))
    return _classes(layers, layers.GlobalAveragePooling1D()(y))


def lstm(layers: Any, x: Any) -> Any:
    """Float sequences ``[rows, 32, 16]``."""
    return _classes(layers, layers.LSTM(_WIDTH)(x))


def tabular(layers: Any, x: Any) -> Any:
    """Categories as strings ``[rows, 8]``, looked up and embedded."""
    ids = layers.StringLookup(vocabulary=_WORDS)(x)
    y = layers.Flatten()(layers.Embedding(VOCABULARY + 1, 8)(ids))
    for _ in range(2):
        y = layers.ReLU()(layers.BatchNormalization()(layers.Dense(_WIDTH)(y)))
    return _classes(layers, y)


def unet(layers: Any, x: Any) -> Any:
    """Float images ``[rows, 64, 64, 1]``; returns a value for each pixel."""

    def convolved(y: Any, filters: int) -> Any:
        return layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(y)))

    skipped, y = [], x
    for filters in (8, 16, 32):
        skipped.append(convolved(y, filters))
        y = layers.MaxPooling2D()(skipped[-1])
    y = convolved(y, _WIDTH)
    for filters, skip in zip((32, 16, 8), reversed(skipped), strict=True):
        y = convolved(layers.Concatenate()([layers.UpSampling2D()(y), skip]), filters)
    return layers.Conv2D(1, 1, activation="sigmoid", name="y")(y)


def _classes(layers: Any, y: Any) -> Any:
    return layers.Dense(_CLASSES, activation="softmax", name="y")(y)
