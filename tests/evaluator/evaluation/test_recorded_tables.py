"""Tables that the evaluation of a dataset records, whatever the model is and however it is split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from understudy.evaluator.batching.engine import Engine, EngineSettings
from understudy.evaluator.datasets.dataset import ArrayDataset
from understudy.evaluator.evaluation.breakdown import BreakdownOptions
from understudy.evaluator.evaluation.dataset_scorer import DatasetScorer
from understudy.evaluator.evaluation.example_outcomes import PredictionReader
from understudy.evaluator.evaluation.slices import parse_slices
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.serving.servable import Servable

EXAMPLES, WIDTH, CLASSES = 50, 3, 3
TIMEOUT = 30.0


class OneRecord:
    """Keeps the tables that are recorded."""

    def __init__(self) -> None:
        self.tables: Any = None

    def record_score(self, *_: Any, tables: Mapping[str, Any] | None = None, **__: Any) -> None:
        self.tables = tables


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    built = Engine(EngineSettings(), SilentObserver())
    yield built
    built.close(TIMEOUT)


@pytest.fixture
def logical(logical_cpus: tuple[str, ...]) -> tuple[str, ...]:
    return logical_cpus


def slot_of(model: Any, folder: Path, devices: tuple[str, ...]) -> Slot:
    model.save(folder / "model.keras")
    return Slot(tf.distribute.MirroredStrategy(list(devices)), folder / "model.keras", max_batch_size=8)


def recorded(
    engine: Engine, slot: Slot, arrays: Mapping[str, Any], *, batch_size: int = 16, slices: tuple[str, ...] = ()
) -> Any:
    record = OneRecord()
    scorer = DatasetScorer(
        engine=engine,
        recorder=record,  # type: ignore[arg-type] # the part that is called
        batch_size=batch_size,
        observer=SilentObserver(),
        with_tables=True,
        breakdown=BreakdownOptions(slices=parse_slices(slices)),
    )
    scorer.score(Servable(step=1, digest="", slot=slot), ArrayDataset("t", arrays), is_wanted=lambda: True)
    return record.tables


def data(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {"x": random.normal(size=(EXAMPLES, WIDTH)).astype(np.float32), "y": random.integers(0, CLASSES, EXAMPLES)}


def test_two_outputs_have_the_tables_of_their_losses(engine: Engine, logical: tuple[str, ...], tmp_path: Path) -> None:
    x = keras.Input((WIDTH,), name="x")
    kind = keras.layers.Dense(CLASSES, activation="softmax", name="kind")(x)
    size = keras.layers.Dense(2, name="size")(x)
    model = keras.Model(x, {"kind": kind, "size": size})
    model.compile(loss={"kind": "sparse_categorical_crossentropy", "size": "mse"})
    arrays = data()
    sizes = np.random.default_rng(1).normal(size=(EXAMPLES, 2)).astype(np.float32)
    slot = slot_of(model, tmp_path, logical[:2])
    tables = recorded(engine, slot, {"x": arrays["x"], "kind": arrays["y"], "size": sizes})

    expected = model.predict(arrays["x"], verbose=0)
    right = expected["kind"].argmax(axis=1) == arrays["y"]
    assert (tables["outputs"]["kind"]["task"], tables["outputs"]["size"]["task"]) == ("sparse", "regression")
    assert tables["outputs"]["kind"]["right"] == tables["outcomes"]["right"] == right.sum()
    predicted = PredictionReader(tables["predicted"]["kind"])
    assert [predicted.of(index) for index in range(EXAMPLES + 1)] == [
        *([one] for one in expected["kind"].argmax(1)),
        [],
    ]
    assert tables["predicted"].keys() == {"kind"}
    errors = expected["size"] - sizes
    assert tables["outputs"]["size"]["mean_absolute"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    losses = -np.log(expected["kind"][np.arange(EXAMPLES), arrays["y"]]) + np.square(errors).mean(axis=1)
    hardest = tables["hardest"][0]
    assert hardest["index"] == losses.argmax()
    assert hardest["loss"] == pytest.approx(losses.max(), rel=1e-5)
    assert hardest["outputs"]["kind"]["actual"] == [arrays["y"][losses.argmax()]]


def test_tables_do_not_depend_on_replicas_and_batches(engine: Engine, logical: tuple[str, ...], tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(CLASSES)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    found = [
        recorded(engine, slot_of(model, tmp_path, logical[:count]), data(), batch_size=size, slices=("label",))
        for count, size in ((1, EXAMPLES), (3, 7))
    ]
    (first, second) = (next(iter(tables["outputs"].values())) for tables in found)
    assert first["confusion"] == second["confusion"]
    assert [label["auc"] for label in first["labels"]] == [label["auc"] for label in second["labels"]]
    assert found[0]["outcomes"] == found[1]["outcomes"]
    assert found[0]["predicted"] == found[1]["predicted"]
    of_slices = [[(one["name"], one["examples"]) for one in tables["slices"]] for tables in found]
    assert of_slices[0] == of_slices[1]
    totals = np.bincount(data()["y"], minlength=CLASSES)
    assert dict(of_slices[0]) == {f"label={number}": total for number, total in enumerate(totals)}
    for one in found[0]["slices"]:
        (tables,) = one["outputs"].values()
        assert np.sum(tables["confusion"], axis=1)[int(one["name"][-1])] == one["examples"] == tables["items"]
    assert [one["index"] for one in found[0]["hardest"]] == [one["index"] for one in found[1]["hardest"]]


@keras.saving.register_keras_serializable("recorded_tables")
class OwnStep(keras.Model):  # type: ignore[misc] # untyped
    """A model that scores whole batches by itself."""

    def test_step(self, data: Any) -> Any:
        return super().test_step(data)


def test_a_model_with_a_step_of_its_own_has_notes_instead(
    engine: Engine, logical: tuple[str, ...], tmp_path: Path
) -> None:
    x = keras.Input((WIDTH,), name="x")
    model = OwnStep(x, keras.layers.Dense(CLASSES, activation="softmax")(x))
    model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    tables = recorded(engine, slot_of(model, tmp_path, logical[:1]), data())
    assert (tables["outputs"], tables["hardest"], tables["outcomes"]) == ({}, [], None)
    assert "whose outputs are not kept" in tables["notes"][0]
    assert "a way of its own" in tables["notes"][1]
