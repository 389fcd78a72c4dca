"""Arrays in files, and the model's inputs and targets among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from understudy.cli import arrays as cli_arrays
from understudy.cli.command_errors import CommandError
from understudy.clients import ModelMetadata
from understudy.clients import TensorSpec as ClientSpec
from understudy.evaluator.datasets.dataset import load_npz
from understudy.evaluator.evaluator_errors import ConfigurationError, InvalidInputError
from understudy.evaluator.types import Signature, TensorSpec
from understudy.experiments.example_arrays import find_examples, find_inputs, read_arrays
from understudy.experiments.experiment_errors import ExampleError


class Spec(NamedTuple):
    name: str
    dtype: str = "float32"


IMAGE, DIGIT = Spec("image"), Spec("digit")
X = np.ones((3, 2), np.float32)
Y = np.arange(3)


@pytest.mark.parametrize("input_key", ["image", "x", "arr_0"])
@pytest.mark.parametrize("target_key", ["digit", "y", "targets", "arr_1"])
def test_a_lone_input_and_a_lone_target_have_several_names(input_key: str, target_key: str) -> None:
    found = find_examples("it", {target_key: Y, input_key: X}, [IMAGE], [DIGIT])
    assert (found.inputs["image"] is X, found.targets["digit"] is Y, found.sample_weight) == (True, True, None)


def test_arrays_without_names_go_by_their_order_the_inputs_first() -> None:
    arrays = {f"arr_{place}": np.full(2, place, np.float32) for place in range(3)}
    found = find_examples("it", arrays, [Spec("a"), Spec("b")], [DIGIT])
    assert {name: array[0] for name, array in {**found.inputs, **found.targets}.items()} == {"a": 0, "b": 1, "digit": 2}


def test_a_name_goes_before_a_place() -> None:
    found = find_inputs("it", {"arr_0": X + 1, "image": X}, [IMAGE])
    np.testing.assert_array_equal(found["image"], X)


def test_a_lone_array_is_the_first_input(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.testing.assert_array_equal(find_inputs("it", read_arrays(tmp_path / "x.npy"), [IMAGE])["image"], X)


def test_dates_are_text(tmp_path: Path) -> None:
    days = np.array(["2026-11-26", "NaT"], "datetime64[D]")
    np.savez(tmp_path / "dated.npz", day=days, waited=np.diff(days))
    found = read_arrays(tmp_path / "dated.npz")
    assert found["day"].tolist() == ["2026-11-26", "NaT"]
    assert found["waited"].tolist() == ["NaT"]


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        (
            {"picture": X, "y": Y},
            r"it has the arrays \['picture', 'y'\]; the model also needs 'image', 'x' or 'arr_0'",
        ),
        (
            {"x": X, "y": Y, "sample_weights": Y},
            r"unknown to the model: \['sample_weights'\]; .* and features that --slice names; leave out",
        ),
        ({"x": X, "y": Y[:2]}, r"numbers of examples: {'x': 3, 'y': 2}; all need the same, at least 1"),
        ({"x": X, "y": Y, "sample_weight": np.float32(1)}, "'sample_weight': 0}; all need the same"),
        ({"x": X[:0], "y": Y[:0]}, "at least 1"),
        ({"x": X.astype(np.complex64), "y": Y}, "it: input 'image' is complex64, the model takes float32"),
    ],
)
def test_what_does_not_fit_is_named(arrays: dict[str, Any], told: str) -> None:
    with pytest.raises(ExampleError, match=told):
        find_examples("it", {key: np.asarray(array) for key, array in arrays.items()}, [IMAGE], [DIGIT])


@pytest.mark.parametrize(
    ("given", "dtype", "becomes"),
    [
        (np.float64, "float32", np.float32),
        (np.uint8, "float32", np.float32),
        (np.float64, "bfloat16", ml_dtypes.bfloat16),
        ("U3", "float32", "U3"),
        ("S3", "string", "S3"),
    ],
)
def test_inputs_are_cast_where_no_kind_of_value_is_lost_and_text_is_not(given: Any, dtype: str, becomes: Any) -> None:
    found = find_inputs("it", {"x": np.zeros(2, given)}, [Spec("image", dtype)])
    assert found["image"].dtype == np.dtype(becomes)


def as_dataset(file: Path, inputs: Sequence[Spec], outputs: Sequence[Spec]) -> None:
    def tensors(specs: Sequence[Spec]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name=spec.name, dtype=spec.dtype, shape=(None, 2)) for spec in specs)

    signature = Signature(inputs=tensors(inputs), outputs=tensors(outputs))
    list(load_npz("test", file).batches(signature, 2))


def as_examples(file: Path, inputs: Sequence[Spec], outputs: Sequence[Spec]) -> None:
    def tensors(specs: Sequence[Spec]) -> tuple[ClientSpec, ...]:
        return tuple(ClientSpec(name=spec.name, dtype=spec.dtype, shape=(None, 2)) for spec in specs)

    metadata = ModelMetadata(
        model_name="model",
        step=1,
        inputs=tensors(inputs),
        outputs=tensors(outputs),
        replicas=1,
        devices=(),
        datasets=(),
        notes=(),
    )
    cli_arrays.examples_to_score(file, metadata)


def flipped(file: Path) -> None:
    np.savez_compressed(file, x=np.arange(4000.0), y=np.arange(4000.0))
    content = bytearray(file.read_bytes())
    for place in range(400, 420):
        content[place] ^= 0xFF
    file.write_bytes(content)


@pytest.mark.parametrize("read", [as_dataset, as_examples])
def test_the_server_and_the_commands_take_and_refuse_the_same_files_in_the_same_words(
    tmp_path: Path, read: Callable[..., None]
) -> None:
    refusals = (ConfigurationError, InvalidInputError, CommandError)
    file = tmp_path / "d.npz"
    np.savez(file, X, Y)
    read(file, [IMAGE], [DIGIT])
    np.savez(file, x=X, y=Y, z=Y)
    with pytest.raises(
        refusals, match=r"has arrays that are unknown to the model: \['z'\]; it takes 'image', 'x' or 'arr_0'; "
    ):
        read(file, [IMAGE], [DIGIT])
    np.savez(file, x=X, y=Y[:2])
    with pytest.raises(refusals, match=r"has arrays with these numbers of examples: {'x': 3, 'y': 2}; all need the"):
        read(file, [IMAGE], [DIGIT])
    flipped(file)
    with pytest.raises(refusals, match=rf"{file} is not a readable \.npy or \.npz file"):
        read(file, [IMAGE], [DIGIT])
    with pytest.raises(refusals, match="there is no file"):
        read(tmp_path / "absent.npz", [IMAGE], [DIGIT])
