"""Gradients are added up in packs, and batches are on the device before their step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from testkit.training_harness import BATCH, STEPS, Dense, assert_bit_equal, run, state_of
from understudy.devices.selection import canonical
from understudy.trainer import TrainSettings, gradients
from understudy.trainer.batches import distribute
from understudy.trainer.data import plan_data
from understudy.trainer.settings import CrossDeviceOpsName
from understudy.trainer.strategies import build_strategy

pytestmark = pytest.mark.long

PACK_BYTES = 1000


@given(sizes=st.lists(st.integers(0, 500) | st.none(), max_size=40), data=st.data())
def test_every_gradient_is_in_one_pack_and_packs_are_small_unless_one_gradient_is_large(
    sizes: list[int | None], data: st.DataObject
) -> None:
    dtypes = data.draw(st.lists(st.sampled_from([tf.float16, tf.float32]), min_size=len(sizes), max_size=len(sizes)))
    grads = [None if size is None else tf.TensorSpec([size], dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "PACK_BYTES", PACK_BYTES)
        packs = gradients.packs(grads)

    assert sorted(place for pack in packs for place in pack) == [p for p, size in enumerate(sizes) if size is not None]
    for pack in packs:
        assert pack == sorted(pack)
        (dtype,) = {dtypes[place] for place in pack}
        assert len(pack) == 1 or sum(sizes[place] * dtype.size for place in pack) <= PACK_BYTES


def test_the_gradients_of_the_last_layers_come_first_and_a_small_model_has_one_pack() -> None:
    grads = [tf.TensorSpec([size]) for size in (100, 100, 100, 300, 10)]
    assert gradients.packs(grads) == [[0, 1, 2, 3, 4]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "PACK_BYTES", PACK_BYTES)
        assert gradients.packs(grads) == [[4], [3], [1, 2], [0]]


OPERATIONS = {
    "auto": "CollectiveReduceV2",
    "hierarchical_copy": "AddN",
    "reduction_to_one_device": "AddN",
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_reduction_joins_the_gradients_of_one_pack_alone(
    name: CrossDeviceOpsName, logical_cpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the traced graph; TensorFlow's default reduction cannot run beside other strategies."""
    monkeypatch.setattr(gradients, "PACK_BYTES", PACK_BYTES)
    settings = TrainSettings(
        run_dir=Path(), steps=1, strategy="mirrored", devices=logical_cpus[:2], cross_device_ops=name
    )
    strategy = build_strategy(settings, None)
    shapes = [(10, 20), (30,), (10, 20), (300,), (40,)]
    reduced: list[list[int]] = []
    kind = type(strategy.extended._cross_device_ops)
    reduce = kind.batch_reduce_implementation

    def noted(self: Any, operation: Any, pairs: Any, options: Any) -> Any:
        reduced.append([int(value.values[0].shape.num_elements()) * 4 for value, _ in pairs])
        return reduce(self, operation, pairs, options)

    monkeypatch.setattr(kind, "batch_reduce_implementation", noted)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        return strategy.run(lambda: gradients._sum_over_replicas([tf.ones(shape) for shape in shapes]))

    operations = step.get_concrete_function().graph.get_operations()
    assert reduced == [[160], [1200], [120, 800], [800]]
    assert any(operation.type == OPERATIONS[name] for operation in operations)
    joined = [operation.outputs[0] for operation in operations if operation.type == "ConcatV2"]
    assert all(tensor.shape.num_elements() * 4 <= 1200 for tensor in joined if tensor.shape.num_elements())


def test_training_in_packs_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirrored = {"strategy": "mirrored", "devices": ("CPU:0", "CPU:1"), "cross_device_ops": "hierarchical_copy"}
    run(Dense(), tmp_path / "whole", **mirrored)
    monkeypatch.setattr(gradients, "PACK_BYTES", 100)
    run(Dense(), tmp_path / "packed", **mirrored)
    assert_bit_equal(state_of(tmp_path / "whole", STEPS), state_of(tmp_path / "packed", STEPS))


def test_on_one_device_each_batch_is_on_it_before_its_step(logical_cpus: tuple[str, ...]) -> None:
    strategy = build_strategy(TrainSettings(run_dir=Path(), steps=1, devices=logical_cpus[1:2]), None)
    data = Dense().training_data()
    plan = plan_data(
        data, global_batch_size=BATCH, replicas=1, seed=0, shuffle_buffer=None, cache=False, keep_remainder=False
    )
    batches = distribute(strategy, data, plan, first_step=0)
    for _ in range(2):
        for tensor in tf.nest.flatten(next(batches)):
            assert canonical(tensor.backing_device) == logical_cpus[1]


def test_a_gpu_that_nobody_named_gets_its_batches_ahead_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.trainer.devices.configure", lambda _: ("GPU:0", "GPU:1"))
    strategy = build_strategy(TrainSettings(run_dir=Path(), steps=1), None)
    assert isinstance(strategy, tf.distribute.OneDeviceStrategy)
    assert [canonical(device) for device in strategy.extended.worker_devices] == ["GPU:0"]


def test_training_on_a_device_by_name_gives_the_bits_of_training_on_the_only_one(
    one_device: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    run(Dense(), tmp_path, devices=("CPU:1",))
    assert_bit_equal(state_of(one_device[0], STEPS), state_of(tmp_path, STEPS))
