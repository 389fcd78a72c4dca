from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.evaluator.datasets.dataset import FINGERPRINT_EXAMPLES, ArrayDataset, ExperimentDataset, load_npz
from understudy.evaluator.evaluator_errors import ConfigurationError, InvalidInputError

pytestmark = pytest.mark.usefixtures("logical_cpus")

ONE = Signature(
    inputs=(TensorSpec(name="image", dtype="float32", shape=(None, 2)),),
    outputs=(TensorSpec(name="digit", dtype="float32", shape=(None, 3)),),
)
TWO = Signature(
    inputs=(
        TensorSpec(name="a", dtype="float32", shape=(None, 2)),
        TensorSpec(name="b", dtype="string", shape=(None,)),
    ),
    outputs=(
        TensorSpec(name="p", dtype="float32", shape=(None, 3)),
        TensorSpec(name="q", dtype="float32", shape=(None, 1)),
    ),
)


def save(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type] # numpy's stub takes allow_pickle among them
    return path


def test_a_file_is_cut_into_batches_in_order(tmp_path: Path) -> None:
    x = np.arange(10, dtype=np.float32).reshape(5, 2)
    file = save(tmp_path / "d.npz", x=x, y=np.arange(5), sample_weight=np.ones(5))
    dataset = load_npz("test", file)

    batches = list(dataset.batches(ONE, 2))

    assert dataset.examples == 5
    assert [batch.examples for batch in batches] == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate([batch.inputs["image"] for batch in batches]), x)
    np.testing.assert_array_equal(np.concatenate([batch.targets["targets"] for batch in batches]), np.arange(5))
    assert batches[0].sample_weights["sample_weights"].shape == (2,)


def test_arrays_are_found_by_the_models_names(tmp_path: Path) -> None:
    file = save(tmp_path / "d.npz", a=np.zeros((2, 2)), b=np.array(["é", "b"]), p=np.zeros((2, 3)), q=np.zeros((2, 1)))

    (batch,) = load_npz("test", file).batches(TWO, 10)

    assert set(batch.inputs) == {"a", "b"}
    assert set(batch.targets) == {"p", "q"}
    assert batch.inputs["b"].tolist() == ["é".encode(), b"b"]


@pytest.mark.parametrize("dtype", ["float64", "uint8", "float16"])
def test_inputs_are_cast_where_no_kind_of_value_is_lost(dtype: str) -> None:
    (batch,) = ArrayDataset("test", {"x": np.ones((1, 2), dtype), "y": np.ones(1)}).batches(ONE, 10)

    assert batch.inputs["image"].dtype == np.float32


def test_an_input_of_another_kind_is_refused() -> None:
    dataset = ArrayDataset("test", {"x": np.ones((1, 2), np.complex64), "y": np.ones(1)})

    with pytest.raises(InvalidInputError, match="input 'image' is complex64, the model takes float32"):
        list(dataset.batches(ONE, 10))


def test_keys_that_do_not_fit_the_model_are_named() -> None:
    missing = ArrayDataset("test", {"picture": np.ones((1, 2)), "y": np.ones(1)})
    surplus = ArrayDataset("test", {"x": np.ones((1, 2)), "y": np.ones(1), "z": np.ones(1)})

    with pytest.raises(InvalidInputError, match=r"'test' has the arrays \['picture', 'y'\]; .*'image', 'x' or 'arr_0'"):
        list(missing.batches(ONE, 10))
    with pytest.raises(InvalidInputError, match=r"unknown to the model: \['z'\]"):
        list(surplus.batches(ONE, 10))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"text"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "d.npz"
    file.write_bytes(content)

    with pytest.raises(ConfigurationError, match=r"dataset 'test': .*d\.npz is not a readable"):
        load_npz("test", file)


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    file = save(tmp_path / "d.npz", x=np.ones((100, 2)), y=np.ones(100))
    file.write_bytes(file.read_bytes()[:-200])

    with pytest.raises(ConfigurationError, match="is not a readable"):
        load_npz("test", file)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    file = save(tmp_path / "d.npz", x=np.ones((100, 2)), y=np.ones(100))
    content = bytearray(file.read_bytes())
    content[500] ^= 1
    file.write_bytes(content)

    with pytest.raises(ConfigurationError, match="is not a readable"):
        load_npz("test", file)


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    file = save(tmp_path / "d.npz", x=np.array([{}, {}], dtype=object), y=np.ones(2))

    with pytest.raises(ConfigurationError, match="without Python objects"):
        load_npz("test", file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no file .*absent\.npz"):
        load_npz("test", tmp_path / "absent.npz")


@pytest.mark.parametrize(("x", "y"), [((3, 2), 2), ((0, 2), 0), ((), 1)])
def test_arrays_without_a_common_length_are_refused(x: tuple[int, ...], y: int) -> None:
    with pytest.raises(ConfigurationError, match="numbers of examples"):
        ArrayDataset("test", {"x": np.ones(x), "y": np.ones(y)})


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b"])
def test_a_name_that_is_no_folders_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="a dataset's name"):
        ArrayDataset(name, {"x": np.ones((1, 2)), "y": np.ones(1)})


def test_digests_tell_contents_apart() -> None:
    def digest(**arrays: np.ndarray) -> str:
        return ArrayDataset("test", arrays).digest

    base = digest(x=np.ones((2, 2)), y=np.ones(2))
    assert digest(y=np.ones(2), x=np.ones((2, 2))) == base
    assert digest(x=np.ones((2, 2)), y=np.zeros(2)) != base
    assert digest(x=np.ones((2, 2), np.float32), y=np.ones(2)) != base
    assert digest(x=np.ones((2, 2)), z=np.ones(2)) != base
    assert digest(x=np.array([b"ab", b"c"], object)) != digest(x=np.array([b"a", b"bc"], object))


def test_an_experiments_examples_become_named_batches() -> None:
    x = np.arange(10, dtype=np.float32).reshape(5, 2)
    dataset = ExperimentDataset("test", tf.data.Dataset.from_tensor_slices((x, np.arange(5), np.ones(5, np.float32))))

    batches = list(dataset.batches(ONE, 2))

    assert dataset.examples == 5
    np.testing.assert_array_equal(np.concatenate([batch.inputs["image"] for batch in batches]), x)
    np.testing.assert_array_equal(np.concatenate([batch.targets["targets"] for batch in batches]), np.arange(5))
    assert batches[-1].sample_weights["sample_weights"].tolist() == [1.0]


def test_an_experiments_dicts_go_by_their_keys_and_tuples_by_their_places() -> None:
    x = {"b": np.array([b"u", b"v"]), "a": np.zeros((2, 2), np.float32)}
    y = (np.zeros((2, 3), np.float32), np.ones((2, 1), np.float32))
    dataset = ExperimentDataset("test", tf.data.Dataset.from_tensor_slices((x, y)))

    (batch,) = dataset.batches(TWO, 10)

    assert batch.inputs["b"].tolist() == [b"u", b"v"]
    assert batch.targets["p"].shape == (2, 3)
    assert batch.targets["q"].shape == (2, 1)


def test_an_experiments_structure_that_does_not_fit_is_refused() -> None:
    dataset = ExperimentDataset("test", tf.data.Dataset.from_tensor_slices((np.zeros((2, 2)), np.zeros(2))))

    with pytest.raises(InvalidInputError, match=r"'test' gives 1 inputs.*\['a', 'b'\]"):
        list(dataset.batches(TWO, 10))


def test_ragged_and_sparse_examples_are_refused_by_their_place() -> None:
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    x = tf.zeros([2, 2])
    refused = "dataset 'test' has y of RaggedTensorSpec.*a dense tensor was expected: pad a ragged one"
    with pytest.raises(ConfigurationError, match=refused):
        ExperimentDataset("test", tf.data.Dataset.from_tensor_slices((x, ragged)))
    sparse = tf.data.Dataset.from_tensor_slices(({"a": tf.sparse.from_dense(x)}, x))
    refused = r"dataset 'test' has x\['a'\] of SparseTensorSpec.*expected: make one of it with tf.sparse.to_dense\(\)"
    with pytest.raises(ConfigurationError, match=refused):
        ExperimentDataset("test", sparse)
    refused = "dataset 'test' has x of RaggedTensorSpec.*only for a model that masks the padding.*'understudy evaluate'"
    with pytest.raises(ConfigurationError, match=refused):
        ExperimentDataset("test", tf.data.Dataset.from_tensor_slices((ragged, x)))


@pytest.mark.parametrize("longer", [1, FINGERPRINT_EXAMPLES + 1])
def test_examples_of_several_shapes_are_refused_with_both_shapes(longer: int) -> None:
    def examples() -> Iterator[tuple[Any, Any]]:
        for index in range(longer + 1):
            yield np.zeros(2, np.float32), np.zeros(3 if index < longer else 4, np.float32)

    specs = (tf.TensorSpec([2]), tf.TensorSpec([None]))
    found = tf.data.Dataset.from_generator(examples, output_signature=specs)
    refused = r"dataset 'test' has examples of shapes \[3\] and \[4\] in one batch; one shape was expected"
    if longer == 1:
        with pytest.raises(ConfigurationError, match=refused):
            ExperimentDataset("test", found)
    else:
        dataset = ExperimentDataset("test", found)
        with pytest.raises(InvalidInputError, match=refused):
            list(dataset.batches(ONE, longer + 1))


def test_an_experiments_elements_have_one_to_three_parts() -> None:
    with pytest.raises(ConfigurationError, match=r"expected x, \(x, y\) or \(x, y, sample_weight\)"):
        ExperimentDataset("test", tf.data.Dataset.from_tensor_slices((np.zeros((2, 2)),) * 4))
    with pytest.raises(ConfigurationError, match="is empty"):
        ExperimentDataset("test", tf.data.Dataset.from_tensor_slices((np.zeros((0, 2)), np.zeros(0))))


def test_a_dataset_that_never_ends_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"dataset 'test' repeats without end; .* leave out repeat\(\)"):
        ExperimentDataset("test", tf.data.Dataset.from_tensor_slices((np.zeros((2, 2)), np.zeros(2))).repeat())


def test_elements_that_are_batches_are_refused_with_what_makes_examples_of_them() -> None:
    examples = tf.data.Dataset.from_tensor_slices((np.zeros((6, 2)), np.zeros((6, 3))))
    of_one_size = ExperimentDataset("test", examples.batch(3))

    with pytest.raises(
        InvalidInputError, match=r"'image' of the shape \[3, 2\]; \[2\] was .*: if they are batches, .*unbatch\(\)"
    ):
        list(of_one_size.batches(ONE, 10))
    with pytest.raises(ConfigurationError, match=r"\[4,2\] and \[2,2\] in one batch; .* batches, .*unbatch\(\)"):
        ExperimentDataset("test", examples.batch(4))
