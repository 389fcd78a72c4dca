"""A function for each replica, as on GPUs: exact like one device, and nothing passes through another replica."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from testkit import exactness, sample_models
from testkit.engine_calls import predict_on
from understudy.evaluator.batching.engine import Engine, EngineSettings
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.model.replica_forward import ReplicaForward
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.observer import SilentObserver

SIZES = (31, 1, 2, 3, 32, 1)
EXACT_KINDS = (
    "binary metrics",
    "class metrics",
    "value metrics",
    "two inputs, two outputs",
    "masked sequences",
    "text of any length",
    "adds a loss",
)

MakeSlot = Callable[..., Slot]


@pytest.fixture(scope="module")
def make(strategy: Callable[[int], Any], tmp_path_factory: pytest.TempPathFactory) -> MakeSlot:
    """Return slots whose replicas have functions of their own."""

    def build(model: Any, *, replicas: int = 3, max_batch_size: int = 6) -> Slot:
        path = tmp_path_factory.mktemp("model") / "model.keras"
        model.save(path)
        return Slot(strategy(replicas), path, max_batch_size=max_batch_size, per_replica=True)

    return build


@pytest.fixture(scope="module")
def model() -> Any:
    return sample_models.image_classifier()


@pytest.fixture(scope="module", params=[1, 3])
def slot(request: pytest.FixtureRequest, model: Any, make: MakeSlot) -> Slot:
    return make(model, replicas=request.param, max_batch_size=20)


def passes(slot: Slot) -> ReplicaForward:
    assert isinstance(slot._pass, ReplicaForward)
    return slot._pass


def test_every_number_of_examples_gives_the_same_examples_in_the_same_order(slot: Slot, model: Any) -> None:
    images = np.random.default_rng(0).normal(size=(97, 6, 6, 1)).astype(np.float32)
    expected = model(images, training=False).numpy()
    for rows in (*range(1, 70), 97):
        np.testing.assert_allclose(
            slot.forward({"inputs": images[:rows]})["outputs"], expected[:rows], rtol=0, atol=1e-5
        )
    assert slot.traces == slot.replicas


@pytest.mark.parametrize("name", EXACT_KINDS)
def test_a_stream_scores_as_one_device_does(name: str, make: MakeSlot) -> None:
    kind = sample_models.KINDS[name]
    model = exactness.build(kind)
    slot = make(model)
    slot.warm_up()
    assert any(kind.whole in note for note in slot.notes) if kind.whole else not slot.notes
    batches = exactness.draw(kind, 7, SIZES, weighted=False)
    (result,) = exactness.score_interleaved(slot, [batches])
    expected = sample_models.evaluate_on_one_device(model, batches)
    assert exactness.deviation(result, expected) <= exactness.ROUNDING, (result, expected)


def test_each_replicas_function_is_on_its_own_device_alone(make: MakeSlot, logical_cpus: tuple[str, ...]) -> None:
    for model in (sample_models.image_classifier(), sample_models.recurrent(), sample_models.two_by_two()):
        functions = passes(make(model)).functions
        assert len(functions) == 3
        for own, function in zip(logical_cpus, functions, strict=False):
            graph = function.graph.as_graph_def()
            nodes = [*graph.node, *(node for body in graph.library.function for node in body.node_def)]
            computing = [
                node for node in nodes if node.op not in {"Placeholder", "_Arg", "_Retval", "Identity", "NoOp"}
            ]
            assert {device_of(node.device) for node in computing} - {""} == {own}
            assert {device_of(variable.device) for variable in function.variables} == {own}
            slices = [node for node in nodes if node.op in {"ConcatV2", "Split", "SplitV"} and not node.device]
            assert not slices


def device_of(name: str) -> str:
    return name.upper().rpartition("DEVICE:")[2]


def test_inputs_are_copied_to_the_replicas_device_and_outputs_stay_there(
    make: MakeSlot, model: Any, logical_cpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = make(model, max_batch_size=4)
    copied: list[str] = []
    identity = tf.raw_ops.Identity

    def noted(**arguments: Any) -> Any:
        tensor = identity(**arguments)
        copied.append(device_of(tensor.backing_device))
        return tensor

    monkeypatch.setattr(tf.raw_ops, "Identity", noted)
    launched = passes(slot)._launch([np.zeros((9, 6, 6, 1), np.float32)], 4)
    assert copied == list(logical_cpus[:3])
    assert [device_of(tensors[0].backing_device) for _, tensors in launched] == list(logical_cpus[:3])
    assert [(share.stop - share.start, share.size) for share, _ in launched] == [(3, 4)] * 3


def note_calls(replica: Any, seen: list[int]) -> None:
    """Note how many examples the replica's function is called with."""
    call = replica._call_flat

    def noting(*arguments: Any) -> Any:
        seen.append(arguments[0].shape[0])
        return call(*arguments)

    replica._call_flat = noting


def test_only_a_few_sizes_reach_the_devices_and_all_were_warmed_up_the_largest_first(
    make: MakeSlot, model: Any
) -> None:
    slot = make(model, replicas=2, max_batch_size=10)
    seen: list[int] = []
    for replica in passes(slot)._replicas:
        note_calls(replica, seen)
    slot.warm_up()
    warmed = list(dict.fromkeys(seen))
    assert warmed == [10, 8, 4, 2, 1]
    for rows in range(1, 45):
        slot.forward({"inputs": np.zeros((rows, 6, 6, 1), np.float32)})
    assert set(seen) == set(warmed)


def test_new_weights_reach_every_replica(make: MakeSlot, tmp_path: Path) -> None:
    model = sample_models.regression()
    slot = make(model)
    slot.warm_up()
    traces = slot.traces
    model.set_weights([weight + 1.0 for weight in model.get_weights()])
    model.save(tmp_path / "model.keras")
    slot.load(tmp_path / "model.keras")
    slot.warm_up()
    x = np.random.default_rng(0).normal(size=(18, 4)).astype(np.float32)
    for rows in (1, 1, 1, 18):  # one example goes to one replica after the other
        np.testing.assert_allclose(
            slot.forward({"x": x[:rows]})["outputs"], model(x[:rows], training=False), rtol=0, atol=1e-5
        )
    assert slot.traces == traces


def test_text_and_values_that_are_refused(make: MakeSlot) -> None:
    tokens = keras.Input((3,), dtype="int32", name="tokens")
    slot = make(keras.Model(tokens, keras.layers.Embedding(11, 4)(keras.ops.abs(tokens))))
    with pytest.raises(InvalidInputError, match="refused the values"):
        slot.forward({"tokens": np.full((5, 3), -99, np.int32)})
    tagger = make(sample_models.tagger())
    with pytest.raises(InvalidInputError, match="'tokens' has 99 in example 4; a value from 0 to 10"):
        tagger.launch({"tokens": np.array([[1]] * 4 + [[99]], np.int32)})


def test_several_batches_are_under_way_at_once_and_each_gets_its_own_examples(slot: Slot, model: Any) -> None:
    images = np.random.default_rng(0).normal(size=(4, 33, 6, 6, 1)).astype(np.float32)
    fetches = [slot.launch({"inputs": batch}) for batch in images]
    for batch, fetch in reversed(list(zip(images, fetches, strict=True))):
        np.testing.assert_allclose(fetch()["outputs"], model(batch, training=False), rtol=0, atol=1e-5)


def test_threads_that_share_a_slot_get_their_own_examples(slot: Slot, model: Any) -> None:
    images = np.random.default_rng(0).normal(size=(4, 16, 6, 6, 1)).astype(np.float32)
    right: list[bool] = []

    def run(index: int) -> None:
        expected = model(images[index], training=False).numpy()
        for _ in range(10):
            outputs = slot.forward({"inputs": images[index]})["outputs"]
            right.append(bool(np.allclose(outputs, expected, rtol=0, atol=1e-5)))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(images))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert right == [True] * 40


def test_an_engine_that_overlaps_batches_answers_each_request_with_its_own_examples(slot: Slot, model: Any) -> None:
    class Borrowed:
        step = 1

        def __init__(self) -> None:
            self.slot = slot

        def release(self) -> None: ...

    images = np.random.default_rng(0).normal(size=(40, 3, 6, 6, 1)).astype(np.float32)
    expected = model(images.reshape(-1, 6, 6, 1), training=False).numpy().reshape(40, 3, -1)
    engine = Engine(EngineSettings(max_batch_size=24, overlap_batches=True, inline_batches=False), SilentObserver())
    futures = [predict_on(engine, {"inputs": image}, borrow=Borrowed, key=1) for image in images]
    for future, wanted in zip(futures, expected, strict=True):
        np.testing.assert_allclose(future.result(30).outputs["outputs"], wanted, rtol=0, atol=1e-5)
    engine.close(10)


def test_trying_a_slot_out_runs_every_replica(make: MakeSlot, model: Any) -> None:
    slot = make(model)
    seen: list[list[int]] = [[] for _ in range(3)]
    for replica, noted in zip(passes(slot)._replicas, seen, strict=True):
        note_calls(replica, noted)
    slot.try_out()
    assert seen == [[1]] * 3
