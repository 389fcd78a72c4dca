"""TF32 is off unless asked for, and evaluations say which it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tensorflow as tf

from testkit import sample_models
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.model.devices import DeviceSettings, build_strategy, precision_note
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.settings import EvaluatorSettings

TF32 = tf.config.experimental


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = TF32.tensor_float_32_execution_enabled()
    yield
    TF32.enable_tensor_float_32_execution(before)


def test_tf32_is_off_unless_speed_was_asked_for(logical_cpus: tuple[str, ...]) -> None:
    for settings, enabled in ((DeviceSettings(), False), (DeviceSettings(precision="fast"), True)):
        build_strategy(DeviceSettings(devices=logical_cpus[:1], precision=settings.precision))
        assert TF32.tensor_float_32_execution_enabled() is enabled


def test_notes_say_how_gpus_multiplied(make_slot: Callable[..., Slot], monkeypatch: pytest.MonkeyPatch) -> None:
    slot = make_slot(sample_models.regression())
    assert list(slot.notes) == []
    monkeypatch.setattr(Slot, "devices", ("GPU:0", "GPU:1"))
    TF32.enable_tensor_float_32_execution(False)
    assert slot.notes == ("precision is exact: GPUs compute float32 products in float32, without TF32",)
    TF32.enable_tensor_float_32_execution(True)
    assert slot.notes == ("precision is fast: GPUs round the factors of float32 products to 10 bits (TF32)",)
    assert precision_note(["CPU:0"]) is None


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="precision is 'tf32'; give exact or fast"):
        EvaluatorSettings(state_dir=Path(), precision="tf32")  # type: ignore[arg-type]
