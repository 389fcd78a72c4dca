"""Training in this process: one device, and several logical CPUs.

Several mirrored strategies in one process must not use TensorFlow's default reduction, whose groups cannot change their
size; so these name another one, and `test_command.py` tries the default.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from testkit.ports import free_ports
from testkit.training_harness import (
    BATCH,
    STEPS,
    Array,
    Dense,
    Exploding,
    Linear,
    Noisy,
    assert_bit_equal,
    assert_one_architecture,
    interrupted,
    run,
    state_of,
    weights_of,
)
from understudy.checkpoints import DirectoryLock, LockHeldError, RunDir, read_manifest, read_training_status
from understudy.checkpoints.layout import MODEL_FILE
from understudy.trainer import (
    NonFiniteLossError,
    PreemptedError,
    ProgressUpdate,
    PublishError,
    ResumeError,
    SilentReporter,
    StrategyError,
    TrainSettings,
)
from understudy.trainer.batches import global_batches
from understudy.trainer.data import plan_data
from understudy.trainer.job import TrainingJob
from understudy.trainer.model import build_model
from understudy.trainer.replica_state import ReplicaState
from understudy.trainer.strategies import build_strategy
from understudy.trainer.tensorboard_files import FOLDER
from understudy.trainer.trainer_errors import MetricsError


def mirrored(replicas: int, cross_device_ops: str = "reduction_to_one_device") -> dict[str, Any]:
    return {
        "strategy": "mirrored",
        "devices": tuple(f"CPU:{index}" for index in range(replicas)),
        "cross_device_ops": cross_device_ops,
    }


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted training with BatchNorm and Dropout on two replicas."""
    run_dir = tmp_path_factory.mktemp("noisy")
    run(Noisy(), run_dir, **mirrored(2))
    return run_dir


def test_one_device_gives_what_fit_gives(one_device: tuple[Path, list[Any]]) -> None:
    experiment = Dense()
    data = experiment.training_data()
    plan = plan_data(
        data, global_batch_size=BATCH, replicas=1, seed=0, shuffle_buffer=None, cache=False, keep_remainder=False
    )
    model = build_model(experiment, seed=0)
    batches = global_batches(data, plan, first_step=0)
    history = model.fit(batches, steps_per_epoch=STEPS // 2, shuffle=False, verbose=0)
    run_dir, _ = one_device
    for trained, fitted in zip(weights_of(run_dir, STEPS // 2), model.get_weights(), strict=True):
        np.testing.assert_allclose(trained, fitted, rtol=0, atol=1e-6)
    metrics = read_manifest(RunDir(run_dir).checkpoint(STEPS // 2)).metrics
    assert metrics == pytest.approx({name: values[0] for name, values in history.history.items()}, rel=1e-6)


@pytest.mark.parametrize(("replicas", "operations"), [(2, "hierarchical_copy"), (3, "reduction_to_one_device")])
def test_replicas_give_the_weights_of_one_device(
    one_device: tuple[Path, list[Any]], tmp_path: Path, replicas: int, operations: str
) -> None:
    run_dir, _ = one_device
    result = run(Dense(), tmp_path, **mirrored(replicas, operations))
    for one, many in zip(weights_of(run_dir, STEPS), weights_of(tmp_path, STEPS), strict=True):
        np.testing.assert_allclose(many, one, rtol=0, atol=1e-5)
    assert result.metrics == pytest.approx(read_manifest(RunDir(run_dir).checkpoint(STEPS)).metrics, rel=1e-5)


class Synchronised(Dense):
    """BatchNorm over the whole global batch, and everything that can be compiled: a schedule, clipping, averaging."""

    name = "synchronised"

    def build_model(self) -> keras.Model:
        features = keras.Input((8,), name="features")
        hidden = keras.layers.Dense(16, activation="relu")(features)
        hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
        model = keras.Model(features, keras.layers.Dense(3, activation="softmax")(hidden))
        schedule = keras.optimizers.schedules.CosineDecay(1e-1, STEPS)
        model.compile(keras.optimizers.SGD(schedule, momentum=0.9, clipnorm=0.2), "sparse_categorical_crossentropy")
        return model

    def training_data(self) -> tf.data.Dataset:
        return super().training_data().map(lambda x, y, _: (x, y["kind"]))


def test_synchronised_batchnorm_sees_the_global_batch(tmp_path: Path) -> None:
    run(Synchronised(), tmp_path / "one", remainder="keep")
    run(Synchronised(), tmp_path / "two", remainder="keep", **mirrored(2))
    for one, two in zip(weights_of(tmp_path / "one", STEPS), weights_of(tmp_path / "two", STEPS), strict=True):
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
    statistics = [rows for rows in state_of(tmp_path / "two", STEPS).values() if rows.shape == (1, 16)]
    assert len(statistics) == 2, "all replicas have the same"


def test_a_full_disk_stops_training_and_leaves_the_checkpoints_before_it(
    one_device: tuple[Path, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(one_device[0], 5, tmp_path)
    monkeypatch.setattr("understudy.trainer.chief.write_snapshot", _disk_full)
    with pytest.raises(PublishError, match=r"step 10 could not be published: .*No space left on device"):
        run(Dense(), tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["000000000005", "lock"]
    monkeypatch.undo()
    assert run(Dense(), tmp_path).first_step == 5


def _disk_full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_nccl_without_gpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="nccl, which needs GPUs"):
        run(Dense(), tmp_path, **mirrored(2, "nccl"))
    status = read_training_status(RunDir(tmp_path), now=0.0)
    assert status is not None
    assert status.state == "failed"


@pytest.mark.usefixtures("quick_starts")
def test_without_a_tpu_the_tpu_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"there is no TPU 'local': .*Error"):
        run(Dense(), tmp_path, strategy="tpu")


@pytest.mark.usefixtures("quick_starts")
def test_a_tpu_that_cannot_be_reached_is_given_up_in_time(tmp_path: Path) -> None:
    address = "grpc://192.0.2.1:8470"  # reserved for documentation: nobody answers
    with pytest.raises(StrategyError, match=rf"no TPU '{address}' was found within 6 s"):
        run(Dense(), tmp_path, strategy="tpu", tpu=address, cluster_timeout_seconds=6.0)


def test_a_device_that_is_not_there_is_named(tmp_path: Path, logical_cpus: tuple[str, ...]) -> None:
    with pytest.raises(StrategyError, match=rf"there is no CPU:9: .* the devices are {', '.join(logical_cpus)}"):
        run(Dense(), tmp_path, strategy="mirrored", devices=("CPU:0", "CPU:9"))


def test_a_gpu_that_cannot_be_had_is_explained(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"--devices asks for GPU:7, .* CUDA_VISIBLE_DEVICES is '-1', which hides"):
        run(Dense(), tmp_path, strategy="mirrored", devices=("CPU:0", "GPU:7"))


def test_events_come_in_order(one_device: tuple[Path, list[Any]]) -> None:
    _, events = one_device
    told = [(event["event"], event.get("step")) for event in events]
    assert told == [
        ("started", None),
        ("advanced", 3),
        ("advanced", 5),
        ("published", 5),
        ("advanced", 8),
        ("advanced", 10),
        ("published", 10),
        ("finished", 10),
    ]


def test_the_last_checkpoint_is_final_and_the_journal_says_finished(one_device: tuple[Path, list[Any]]) -> None:
    run_dir = RunDir(one_device[0])
    assert run_dir.committed_steps() == [5, 10]
    manifests = [read_manifest(run_dir.checkpoint(step)) for step in (5, 10)]
    assert [manifest.final for manifest in manifests] == [False, True]
    assert [manifest.epoch for manifest in manifests] == [1, 2]
    signature = manifests[0].signature
    assert signature is not None
    assert [spec.name for spec in signature.outputs] == ["kind", "size"]
    status = read_training_status(run_dir, now=0.0)
    assert status is not None
    assert (status.state, status.final_step) == ("finished", STEPS)


def test_tensorboard_reads_the_scalars(one_device: tuple[Path, list[Any]]) -> None:
    scalars = EventAccumulator(str(one_device[0] / FOLDER))
    scalars.Reload()
    tags = scalars.Tags()["tensors"]
    assert {"loss", "kind_accuracy", "examples_per_second"} <= set(tags)
    assert [event.step for event in scalars.Tensors("loss")] == [3, 5, 8, 10]


def test_the_published_model_is_a_plain_one_in_a_plain_process(noisy: Path) -> None:
    script = (
        "import sys, keras, numpy\n"
        "model = keras.models.load_model(sys.argv[1])\n"
        "scores = model.evaluate(numpy.ones((4, 8)), numpy.ones(4), verbose=0, return_dict=True)\n"
        "print(int(model.optimizer.iterations), len(model.optimizer.variables), sorted(scores))\n"
    )
    model_file = RunDir(noisy).checkpoint(STEPS) / MODEL_FILE
    done = subprocess.run(
        [sys.executable, "-c", script, str(model_file)], capture_output=True, text=True, check=True, timeout=60
    )
    trained_variables = 6
    assert done.stdout.split("\n")[-2] == f"{STEPS} {2 + 2 * trained_variables} ['accuracy', 'loss']"


def test_the_published_model_holds_the_mean_of_the_replicas_statistics(noisy: Path) -> None:
    statistics = [rows for rows in state_of(noisy, STEPS).values() if rows.shape == (2, 16)]
    model = keras.models.load_model(RunDir(noisy).checkpoint(STEPS) / MODEL_FILE)
    (norm,) = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    published: list[Array] = [norm.moving_mean.numpy(), norm.moving_variance.numpy()]
    assert len(statistics) == 2
    for rows, mean in zip(statistics, published, strict=True):
        assert not np.array_equal(rows[0], rows[1])
        np.testing.assert_allclose(rows.mean(axis=0), mean, rtol=1e-6)


def test_resuming_gives_the_same_bits(noisy: Path, tmp_path: Path) -> None:
    result = run(Noisy(), interrupted(noisy, 5, tmp_path), **mirrored(2))
    assert result.first_step == 5
    assert_one_architecture(tmp_path)
    assert_bit_equal(state_of(noisy, STEPS), state_of(tmp_path, STEPS))
    ours, theirs = (read_manifest(RunDir(folder).checkpoint(STEPS)).metrics for folder in (noisy, tmp_path))
    assert ours == theirs


class Preempting(SilentReporter):
    """Sends SIGTERM to this process once some steps are done."""

    def advanced(self, update: ProgressUpdate) -> None:
        if update.step == 2:
            signal.raise_signal(signal.SIGTERM)


def test_sigterm_saves_first_and_resuming_gives_the_same_bits(noisy: Path, tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(PreemptedError, match="step 4 is saved"):
        run(Noisy(), tmp_path, checkpoint_every=10, steps_per_call=2, progress=Preempting(), **mirrored(2))
    assert signal.getsignal(signal.SIGTERM) == handler
    assert RunDir(tmp_path).committed_steps() == [4]
    run(Noisy(), tmp_path, **mirrored(2))
    assert_bit_equal(state_of(noisy, STEPS), state_of(tmp_path, STEPS))


class Scraping(SilentReporter):
    """Reads the metrics at the end of the training."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._url = f"http://127.0.0.1:{port}/metrics"
        self.text = ""

    def finished(self, step: int) -> None:
        del step
        self.text = httpx.get(self._url, timeout=60).text
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", self._port), timeout=60)


def test_prometheus_can_scrape_a_task(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    scraping = Scraping(port)
    run(Linear(), tmp_path, metrics_port=port, progress=scraping)
    lines = scraping.text.splitlines()
    assert f"understudy_train_steps_total {STEPS:.1f}" in lines
    assert f"understudy_train_examples_total {STEPS * BATCH:.1f}" in lines
    assert "understudy_train_checkpoint_seconds_count 2.0" in lines
    assert "understudy_train_restarts 0.0" in lines
    assert any(line.startswith("understudy_train_input_wait_seconds_total 0.") for line in lines)
    assert any(line.startswith("understudy_train_loss ") for line in lines)
    with socket.create_server(("", port)), pytest.raises(MetricsError, match=f"--metrics-port {port} cannot"):
        run(Linear(), tmp_path, metrics_port=port)


def test_a_training_that_is_done_has_nothing_to_do(one_device: tuple[Path, list[Any]]) -> None:
    run_dir, _ = one_device
    before = (RunDir(run_dir).checkpoint(STEPS) / MODEL_FILE).stat()
    result = run(Dense(), run_dir)
    assert (result.step, result.first_step, result.metrics) == (STEPS, STEPS, {})
    assert (RunDir(run_dir).checkpoint(STEPS) / MODEL_FILE).stat() == before


@pytest.mark.parametrize(
    ("experiment", "values", "message"),
    [
        (Dense(), {"seed": 1}, "with seed 0, this training has 1"),
        (Dense(), {"global_batch_size": 12}, "with global_batch_size 24, this training has 12"),
        (Dense(), mirrored(2), "with replicas 1, this training has 2"),
        (Noisy(), {}, "holds another model"),
    ],
)
def test_what_cannot_go_on_exactly_is_refused(
    one_device: tuple[Path, list[Any]], experiment: Dense, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ResumeError, match=message):
        run(experiment, one_device[0], steps=20, **values)


def test_a_run_folder_in_use_is_refused(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path), pytest.raises(LockHeldError, match="in use by process"):
        run(Dense(), tmp_path)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLossError, match="the loss became nan by step 8"):
        run(Exploding(), tmp_path, checkpoint_every=4, steps_per_call=4)
    run_dir = RunDir(tmp_path)
    assert run_dir.committed_steps() == [4]
    status = read_training_status(run_dir, now=0.0)
    assert status is not None
    assert status.reason.startswith("NonFiniteLossError")


def test_weights_that_are_not_finite_are_not_published(tmp_path: Path) -> None:
    # The loss of step 6 was computed before that step ruined the weights.
    with pytest.raises(NonFiniteLossError, match="after step 6 a weight is NaN or infinite"):
        run(Exploding(), tmp_path, checkpoint_every=6, steps_per_call=6)
    assert RunDir(tmp_path).committed_steps() == []


def test_every_replica_drops_out_its_own(logical_cpus: tuple[str, ...]) -> None:
    strategy = tf.distribute.MirroredStrategy(list(logical_cpus[:3]))
    with strategy.scope():
        dropout = keras.layers.Dropout(0.5, seed=1)
        dropout.build((None, 64))
    alone = keras.layers.Dropout(0.5, seed=1)
    ReplicaState(strategy, dropout.variables).seed_replicas()

    @tf.function  # type: ignore[untyped-decorator] # TensorFlow ships no types
    def drop_out() -> Any:
        return strategy.run(lambda: dropout(tf.ones((1, 64)), training=True))

    for _ in range(2):
        masks = [mask.numpy() for mask in strategy.experimental_local_results(drop_out())]
        np.testing.assert_array_equal(masks[0], alone(tf.ones((1, 64)), training=True))
        assert len({mask.tobytes() for mask in masks}) == 3


def test_what_was_captured_is_restored_to_every_replica(tmp_path: Path) -> None:
    settings = TrainSettings(run_dir=tmp_path, steps=4, checkpoint_every=2, steps_per_call=2, **mirrored(2))
    job = TrainingJob(Noisy(), settings, build_strategy(settings, None))
    (event,) = islice(job.run(0), 1)
    step = event.step
    captured = job.capture(step)
    list(job.run(step))
    moved_on = job.capture(4)
    job.restore(captured)
    restored = job.capture(step)
    for one, other in zip((*captured.trained, *captured.replica), (*restored.trained, *restored.replica), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(captured.trained[0], moved_on.trained[0])
