"""What dropped models hold is given back."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from testkit import sample_models
from testkit.resident import freed_between_others, resident_mib
from understudy.checkpoints.kinds import ModelKind
from understudy.evaluator.evaluator_errors import LoadError
from understudy.evaluator.model import reclaiming
from understudy.evaluator.model.forward import DirectCall
from understudy.evaluator.model.loaders import loader_for
from understudy.evaluator.model.reclaiming import MemoryTrimmer, reclaim_memory
from understudy.evaluator.model.slot import Slot


def function() -> Any:
    signature = [tf.TensorSpec([None, 1])]
    return tf.function(lambda x: [x + 1.0], input_signature=signature).get_concrete_function()


def test_the_model_that_a_saved_model_takes_the_place_of_is_freed(
    strategy: Callable[[int], Any], tmp_path: Path
) -> None:
    sample_models.image_classifier().export(str(tmp_path / "model"), verbose=False)
    slot = Slot(strategy(1), tmp_path / "model", max_batch_size=8, loader=loader_for(ModelKind.SAVED_MODEL, None))
    slot.warm_up()
    models = []
    for _ in range(3):
        models.append(weakref.ref(slot._model))
        assert slot.load(tmp_path / "model")
        slot.warm_up()
    reclaim_memory()

    assert [model() is None for model in models] == [True] * 3


def test_the_model_that_a_saved_model_takes_the_place_of_is_freed_before_it_is_built(
    strategy: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_models.image_classifier().export(str(tmp_path / "model"), verbose=False)
    slot = Slot(strategy(1), tmp_path / "model", max_batch_size=8, loader=loader_for(ModelKind.SAVED_MODEL, None))
    slot.warm_up()
    before = weakref.ref(slot._model)
    was_freed = []
    build = slot._loader.build

    def damaged(model_file: Path) -> Any:
        was_freed.append(before() is None)
        raise LoadError(f"{model_file.name} is damaged")

    monkeypatch.setattr(slot._loader, "build", damaged)
    for _ in range(2):
        with pytest.raises(LoadError):
            slot.load(tmp_path / "model")
    monkeypatch.setattr(slot._loader, "build", build)
    assert slot.load(tmp_path / "model")
    slot.warm_up()

    assert was_freed == [True, True]


def test_kernels_of_functions_that_are_no_more_are_given_back_once_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reclaiming, "_MAX_DROPPED", 8)
    gc.collect()
    reclaim_memory()
    stays = DirectCall(function(), ["CPU:0"])
    before = stays(np.ones((1, 1), np.float32))[0].numpy()
    reclaiming.DROPPED_BYTES.clear()
    done = []
    for _ in range(reclaiming._MAX_DROPPED):
        DirectCall(function(), ["CPU:0"])(np.ones((1, 1), np.float32))
        done.append(reclaim_memory())

    assert done == [False] * (reclaiming._MAX_DROPPED - 1) + [True]
    np.testing.assert_array_equal(stays(np.ones((1, 1), np.float32))[0].numpy(), before)


def test_kernels_of_large_functions_are_given_back_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    reclaiming.DROPPED_BYTES.clear()
    size = len(function().graph.as_graph_def().SerializeToString())
    monkeypatch.setattr(reclaiming, "_MAX_DROPPED_BYTES", 2 * size - 10)
    done = []
    for _ in range(2):
        DirectCall(function(), ["CPU:0"])(np.ones((1, 1), np.float32))
        done.append(reclaim_memory())

    assert done == [False, True]


def test_a_function_that_holds_much_is_called_by_its_name() -> None:
    table = np.random.default_rng(0).normal(size=2**22).astype(np.float32)
    signature = [tf.TensorSpec([None, 1])]
    large = tf.function(lambda x: [x + tf.reduce_sum(table)], input_signature=signature).get_concrete_function()
    direct = DirectCall(large, ["CPU:0"])

    assert not direct._is_direct
    expected = large(tf.ones([1, 1]))[0].numpy()
    np.testing.assert_array_equal(direct(np.ones((1, 1), np.float32))[0].numpy(), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator of Linux")
def test_memory_that_was_freed_between_parts_in_use_is_given_back() -> None:
    reclaim_memory()  # else the blocks may take what earlier tests have freed
    trimmer = MemoryTrimmer()
    kept = freed_between_others(128)
    before = resident_mib()
    trimmer.trim_if_grown()
    assert resident_mib() < before - 64
    del kept


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator of Linux")
def test_memory_that_was_in_use_at_a_trim_is_given_back_though_the_process_does_not_grow_again() -> None:
    reclaim_memory()
    trimmer = MemoryTrimmer()
    kept = freed_between_others(128, meanwhile=trimmer.trim_if_grown)
    before = resident_mib()
    for _ in range(8):
        trimmer.trim_if_grown()
    assert resident_mib() < before - 64
    del kept
