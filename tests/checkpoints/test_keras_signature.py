"""Names, types and shapes survive saving and loading, whatever the kind of model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from understudy.checkpoints.keras_signature import SignatureError, interface_of, signature_of
from understudy.checkpoints.signature import Signature, TensorSpec

# Building a model fixes TensorFlow's devices for the whole process: they are laid out before.
pytestmark = pytest.mark.usefixtures("logical_cpus")


@keras.saving.register_keras_serializable("test_keras_signature")
class Pairs(keras.Model):  # type: ignore[misc]
    """Takes floats and token ids, gives a nested structure."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(3)
        self.embedding = keras.layers.Embedding(10, 4)

    def call(self, inputs: dict[str, Any], training: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002
        del training
        return {"dense": self.dense(inputs["floats"]), "rest": [self.embedding(inputs["ids"])]}


@keras.saving.register_keras_serializable("test_keras_signature")
class FixedLength(keras.Model):  # type: ignore[misc]
    """Takes token ids of one length only."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embedding = keras.layers.Embedding(10, 4)
        self.flatten = keras.layers.Flatten()
        self.dense = keras.layers.Dense(3)

    def call(self, inputs: Any, training: bool = False) -> Any:  # noqa: FBT001, FBT002
        del training
        return self.dense(self.flatten(self.embedding(inputs)))


def lone_nameless() -> Any:
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(2)(inputs))


def lone_named() -> Any:
    inputs = keras.Input((8, 8, 1), name="image")
    flat = keras.layers.Flatten()(inputs)
    return keras.Model(inputs, keras.layers.Dense(10, name="digit")(flat))


def built_by_a_call() -> Any:
    model = keras.Sequential([keras.layers.Dense(3)])
    model(np.zeros((5, 4), np.float32))
    return model


def partly_named() -> Any:
    left, right = keras.Input((2,), name="left"), keras.Input((None,), dtype="int32")
    embedded = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(9, 2)(right))
    total = keras.layers.Add()([left, embedded])
    return keras.Model([left, right], [keras.layers.Dense(1, name="score")(total), total])


def nested() -> Any:
    first, second = keras.Input((2,), name="first"), keras.Input((), dtype="string", name="second")
    return keras.Model(
        {"first": first, "second": second},
        {"b": (keras.layers.Dense(1, name="x")(first), second), "a": keras.layers.Dense(2, name="y")(first)},
    )


def subclassed() -> Any:
    model = Pairs()
    model({"floats": np.zeros((5, 4), np.float32), "ids": np.zeros((5, 7), np.int32)})
    return model


def fixed_length() -> Any:
    model = FixedLength()
    model(np.zeros((5, 7), np.int32))
    return model


EXPECTED: list[tuple[Callable[[], Any], list[TensorSpec], list[TensorSpec]]] = [
    (
        lone_nameless,
        [TensorSpec(name="inputs", dtype="float32", shape=(None, 4))],
        [TensorSpec(name="outputs", dtype="float32", shape=(None, 2))],
    ),
    (
        lone_named,
        [TensorSpec(name="image", dtype="float32", shape=(None, 8, 8, 1))],
        [TensorSpec(name="digit", dtype="float32", shape=(None, 10))],
    ),
    (
        built_by_a_call,
        [TensorSpec(name="inputs", dtype="float32", shape=(None, 4))],
        [TensorSpec(name="outputs", dtype="float32", shape=(None, 3))],
    ),
    (
        partly_named,
        [
            TensorSpec(name="left", dtype="float32", shape=(None, 2)),
            TensorSpec(name="1", dtype="int32", shape=(None, None)),
        ],
        [
            TensorSpec(name="score", dtype="float32", shape=(None, 1)),
            TensorSpec(name="1", dtype="float32", shape=(None, 2)),
        ],
    ),
    (
        nested,
        [
            TensorSpec(name="first", dtype="float32", shape=(None, 2)),
            TensorSpec(name="second", dtype="string", shape=(None,)),
        ],
        [
            TensorSpec(name="a", dtype="float32", shape=(None, 2)),
            TensorSpec(name="b/0", dtype="float32", shape=(None, 1)),
            TensorSpec(name="b/1", dtype="string", shape=(None,)),
        ],
    ),
    (
        subclassed,
        [
            TensorSpec(name="floats", dtype="float32", shape=(None, 4)),
            TensorSpec(name="ids", dtype="int32", shape=(None, None)),
        ],
        [
            TensorSpec(name="dense", dtype="float32", shape=(None, 3)),
            TensorSpec(name="rest/0", dtype="float32", shape=(None, None, 4)),
        ],
    ),
    (
        fixed_length,
        [TensorSpec(name="inputs", dtype="int32", shape=(None, 7))],
        [TensorSpec(name="outputs", dtype="float32", shape=(None, 3))],
    ),
]


@pytest.mark.parametrize(("build", "inputs", "outputs"), EXPECTED, ids=[case[0].__name__ for case in EXPECTED])
def test_a_signature_is_the_same_before_saving_and_after_loading(
    tmp_path: Path, build: Callable[[], Any], inputs: list[TensorSpec], outputs: list[TensorSpec]
) -> None:
    model = build()
    before = signature_of(model)
    model.save(tmp_path / "model.keras")
    after = signature_of(keras.saving.load_model(tmp_path / "model.keras"))
    assert list(before.inputs) == inputs
    assert list(before.outputs) == outputs
    assert after == before


POSITIONAL: list[tuple[Callable[[], Any], list[bool], list[bool]]] = [
    (lone_nameless, [True], [True]),
    (lone_named, [False], [False]),
    (built_by_a_call, [True], [True]),
    (partly_named, [False, True], [False, True]),
    (nested, [False, False], [False, False, False]),
    (subclassed, [False, False], [False, False]),
    (fixed_length, [True], [True]),
]


@pytest.mark.parametrize(("build", "inputs", "outputs"), POSITIONAL, ids=[case[0].__name__ for case in POSITIONAL])
def test_a_signature_says_which_names_stand_for_places(
    build: Callable[[], Any], inputs: list[bool], outputs: list[bool]
) -> None:
    signature = signature_of(build())
    assert [spec.positional for spec in signature.inputs] == inputs
    assert [spec.positional for spec in signature.outputs] == outputs
    restored = Signature.from_json(signature.as_json())
    assert [spec.positional for spec in restored.inputs] == inputs


def test_a_signature_written_before_places_were_told_apart_is_the_same_signature() -> None:
    signature = signature_of(lone_nameless())
    written = {
        key: [{k: v for k, v in spec.items() if k != "positional"} for spec in specs]
        for key, specs in signature.as_json().items()
    }
    assert Signature.from_json(written) == signature


def test_names_lead_into_the_models_own_structure_and_back() -> None:
    interface = interface_of(nested())
    values = {"a": 1, "b/0": 2, "b/1": 3}
    structure = interface.outputs.unflatten(values)
    assert structure == {"a": 1, "b": (2, 3)}
    assert interface.outputs.flatten(structure) == values


def test_a_model_that_was_never_built_is_refused_with_the_remedy() -> None:
    with pytest.raises(SignatureError, match="Call the model on one batch"):
        signature_of(Pairs())
