"""Training from files that need not fit into memory: as exact as from memory, on one device, replicas and workers."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

from testkit import training_files as files
from testkit.training_files import FOLDER, NoisyArrays, NoisyRecords, PlainRecords, write_files
from testkit.training_harness import (
    BATCH,
    EXAMPLES,
    STEPS,
    Dense,
    Task,
    assert_bit_equal,
    cluster,
    interrupted,
    run,
    start_training,
    state_of,
    weights_of,
)
from understudy.checkpoints import RunDir
from understudy.experiments.arrays import array_examples
from understudy.experiments.records import RecordExamples, record_examples
from understudy.trainer import DataError, SilentReporter
from understudy.trainer.batches import Share, global_batches
from understudy.trainer.data import DataPlan, plan_data

pytestmark = pytest.mark.long

if TYPE_CHECKING:
    from understudy.experiments.experiment_data import TrainingData

OPTIONS = ("--steps", str(STEPS), "--checkpoint-every", "5", "--steps-per-call", "3", "--no-tensorboard")
ENDLESS = (*OPTIONS, "--steps", "1000000", "--keep-checkpoints", "1000000")
MIRRORED = {"strategy": "mirrored", "devices": ("CPU:0", "CPU:1"), "cross_device_ops": "reduction_to_one_device"}


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_files(folder)
    monkeypatch.setenv(FOLDER, str(folder))
    return folder


def plan(data: TrainingData, **values: Any) -> DataPlan:
    defaults = {"global_batch_size": BATCH, "replicas": 1, "seed": 3, "shuffle_buffer": None, "cache": True}
    return plan_data(data, **{**defaults, "keep_remainder": False, **values})


def take(dataset: tf.data.Dataset, count: int) -> list[Any]:
    return [x.numpy() for x, _ in islice(dataset, count)]


@pytest.mark.parametrize("open_data", [files.from_arrays, files.from_records])
@pytest.mark.parametrize("keep_remainder", [False, True])
def test_what_is_in_a_step_depends_on_the_step_alone(open_data: Any, keep_remainder: bool) -> None:  # noqa: FBT001 - a parameter of the test
    data = open_data()
    cut = plan(data, keep_remainder=keep_remainder)
    whole = take(global_batches(data, cut, first_step=0), 9)
    for first_step in (1, 3, 4, 6):
        resumed = take(global_batches(open_data(), cut, first_step=first_step), 9 - first_step)
        np.testing.assert_array_equal(resumed, whole[first_step:])


@pytest.mark.parametrize("open_data", [files.from_arrays, files.from_records])
def test_an_epoch_holds_each_example_once_in_an_order_of_its_own(open_data: Any) -> None:
    data = open_data()
    batches = take(global_batches(data, plan(data, global_batch_size=EXAMPLES // 2), first_step=0), 4)
    first, second = np.concatenate(batches[:2]), np.concatenate(batches[2:])
    everything = np.stack([x for x, _ in data.dataset().as_numpy_iterator()])
    for epoch in (first, second):
        np.testing.assert_array_equal(np.unique(epoch, axis=0), np.unique(everything, axis=0))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, everything)
    other_seed = take(global_batches(data, plan(data, global_batch_size=EXAMPLES // 2, seed=4), first_step=0), 2)
    assert not np.array_equal(first, np.concatenate(other_seed))


@pytest.mark.parametrize("open_data", [files.from_arrays, files.from_records, lambda: files.from_records().dataset()])
def test_the_workers_shares_of_a_batch_are_the_batch(open_data: Any) -> None:
    data = open_data()
    cut = plan(data)
    whole = take(global_batches(data, cut, first_step=2), 5)
    shares = [Share(first=0, count=2, of=6), Share(first=2, count=2, of=6), Share(first=4, count=2, of=6)]
    parts = [take(global_batches(data, cut, first_step=2, share=share), 10) for share in shares]
    for step, batch in enumerate(whole):
        rows = [part for worker in parts for part in worker[2 * step : 2 * step + 2]]
        np.testing.assert_array_equal(np.concatenate(rows), batch)


@pytest.mark.parametrize(("experiment", "values"), [(NoisyArrays(), MIRRORED), (NoisyRecords(), {})])
def test_resuming_gives_the_same_bits(tmp_path: Path, experiment: Any, values: dict[str, Any]) -> None:
    run(experiment, tmp_path / "whole", **values)
    assert run(experiment, interrupted(tmp_path / "whole", 5, tmp_path / "resumed"), **values).first_step == 5
    assert_bit_equal(state_of(tmp_path / "whole", STEPS), state_of(tmp_path / "resumed", STEPS))


def finish(*tasks: Task) -> None:
    for task in tasks:
        assert task.end() == 0, task.errors


def test_after_a_kill_the_training_from_arrays_goes_on_exactly(tmp_path: Path) -> None:
    spec = f"{files.__file__}:NoisyArrays"
    task = start_training(spec, tmp_path / "killed", *ENDLESS)
    task.wait_for("published step 5")
    task.kill()
    task.end()
    last = RunDir(tmp_path / "killed").committed_steps()[-1]
    finish(start_training(spec, tmp_path / "killed", *OPTIONS, "--steps", str(last + 5)))
    run(NoisyArrays(), tmp_path / "whole", steps=last + 5, checkpoint_every=last + 5)
    assert_bit_equal(state_of(tmp_path / "whole", last + 5), state_of(tmp_path / "killed", last + 5))


def test_two_workers_come_to_what_one_device_does(tmp_path: Path) -> None:
    with cluster(f"{files.__file__}:PlainRecords", tmp_path / "two", *OPTIONS) as tasks:
        finish(*tasks)
    run(PlainRecords(), tmp_path / "one")
    for one, two in zip(weights_of(tmp_path / "one", STEPS), weights_of(tmp_path / "two", STEPS), strict=True):
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)


class Wide(Dense):
    """Rows of 100 kB."""

    columns = 25_000

    def __init__(self, data: Any) -> None:
        self._data = data

    def build_model(self) -> keras.Model:
        model = keras.Sequential([keras.Input((self.columns,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def training_data(self) -> Any:
        return self._data


def private_bytes() -> int:
    """Return how much memory of its own this process holds; what it has mapped from files is not among it."""
    info = psutil.Process().memory_info()
    return int(info.rss - info.shared)


def sparse_arrays(folder: Path) -> Any:
    x = np.lib.format.open_memmap(folder / "wide.npy", "w+", np.float32, (8_000, Wide.columns))
    return array_examples((x, np.zeros(len(x), np.float32)))


def wide_records(folder: Path) -> RecordExamples:
    path = folder / "wide.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for _ in range(4_000):
            writer.write(bytes(4 * Wide.columns))
    return record_examples(
        [path], lambda record: (tf.ensure_shape(tf.io.decode_raw(record, tf.float32), (Wide.columns,)), 0.0)
    )


@pytest.mark.parametrize(("write", "options"), [(sparse_arrays, {}), (wide_records, {"shuffle_buffer": 100})])
def test_memory_stays_bounded(tmp_path: Path, write: Any, options: dict[str, Any]) -> None:
    data = write(tmp_path)
    total_bytes = data.size * 4 * Wide.columns
    run(Wide(data), tmp_path / "warm", steps=6, checkpoint_every=6, **options)
    before = private_bytes()
    held: list[int] = []

    class Weighing(SilentReporter):
        def advanced(self, update: Any) -> None:
            del update
            held.append(private_bytes() - before)

    steps = data.size // BATCH  # an epoch
    run(Wide(data), tmp_path / "run", steps=steps, checkpoint_every=steps, progress=Weighing(), **options)
    assert max(held) < total_bytes / 4, f"{max(held)} of {total_bytes} bytes are held"


def test_a_shuffle_buffer_is_not_for_arrays() -> None:
    with pytest.raises(DataError, match="shuffle_buffer is 10, but arrays are shuffled whole"):
        plan(files.from_arrays(), shuffle_buffer=10)


@pytest.mark.parametrize(
    ("data", "cache", "expected"),
    [
        (lambda: tf.data.Dataset.range(20_000).map(lambda x: (x, tf.strings.as_string(x))), False, 10_000),
        (lambda: tf.data.Dataset.range(10_000).map(lambda x: (tf.zeros((2**14,)), x)), False, 4095),
        (lambda: tf.data.Dataset.range(10_000).map(lambda x: (tf.zeros((2**14,)), x)), True, 10_000),
        (lambda: tf.data.Dataset.range(50).map(lambda x: (tf.zeros((2**28,)), x)), False, BATCH),
        (files.from_records, True, EXAMPLES),
    ],
)
def test_what_is_not_in_memory_is_shuffled_among_what_fits(data: Any, cache: bool, expected: int) -> None:  # noqa: FBT001 - a parameter of the test
    assert plan(data(), cache=cache).shuffle_buffer == expected


def test_a_file_that_is_damaged_or_too_short_is_named_as_such(tmp_path: Path, folder: Path) -> None:
    file = folder / "1.tfrecord"
    data = files.from_records()

    class Given(NoisyRecords):
        def training_data(self) -> Any:
            return data

    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"a file of the training data is damaged: .*truncated record at"):
        run(Given(), tmp_path / "damaged")
    file.write_bytes(b"")
    with pytest.raises(DataError, match=r"does not hold the stated number of examples: .*contained only 77"):
        run(Given(), tmp_path / "short")
