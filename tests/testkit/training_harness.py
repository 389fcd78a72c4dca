"""Experiments to train in tests, and clusters of subprocesses to train them in."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import psutil
import tensorflow as tf

from testkit.ports import free_ports
from testkit.preloading import preloaded
from understudy.checkpoints import RunDir
from understudy.checkpoints.layout import MODEL_FILE, RESUME_DIR
from understudy.evaluator.model.loaders.stored_config import read_archive
from understudy.trainer import TrainResult, TrainSettings, train

EXAMPLES = 100
BATCH = 24  # divides evenly by 1, 2 and 3 replicas; leaves 4 of the 100 examples
STEPS_PER_EPOCH = EXAMPLES // BATCH
TIMEOUT_SECONDS = 250.0
STEPS = 10
CONFIG = "config.json"
ADDRESS = re.compile(rb'"shared_object_id": \d+')
"""What Keras 3.15 writes of the memory addresses of the objects in a model's config."""

Array = npt.NDArray[Any]

as_it_is = tf.autograph.experimental.do_not_convert  # as each task of a cluster would convert the function anew


class Dense:
    """No BatchNorm, no Dropout; but two outputs, sample weights, a regulariser and clipping."""

    name = "dense"
    global_batch_size = BATCH

    def build_model(self) -> keras.Model:
        features = keras.Input((8,), name="features")
        hidden = keras.layers.Dense(16, activation="relu", kernel_regularizer="l2")(features)
        kind = keras.layers.Dense(3, activation="softmax", name="kind")(hidden)
        size = keras.layers.Dense(1, name="size")(hidden)
        model = keras.Model(features, {"kind": kind, "size": size})
        model.compile(
            keras.optimizers.Adam(1e-2, global_clipnorm=0.5),
            loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.5},
            metrics={"kind": ["accuracy"]},
        )
        return model

    def training_data(self) -> tf.data.Dataset:
        random = np.random.default_rng(7)
        x = random.normal(size=(EXAMPLES, 8)).astype(np.float32)
        y = {"kind": random.integers(0, 3, EXAMPLES), "size": x[:, :1] * 2}
        weights = random.uniform(0.5, 2.0, EXAMPLES).astype(np.float32)
        return tf.data.Dataset.from_tensor_slices((x, y, {"kind": weights, "size": weights[::-1].copy()}))

    def evaluation_data(self) -> Mapping[str, tf.data.Dataset]:
        return {}


def _with_size(x: tf.Tensor, y: Mapping[str, tf.Tensor], _: object) -> tuple[tf.Tensor, tf.Tensor]:
    return x, y["size"]


def _with_kind(x: tf.Tensor, y: Mapping[str, tf.Tensor], _: object) -> tuple[tf.Tensor, tf.Tensor]:
    return x, y["kind"]


class Linear(Dense):
    """One layer and plain SGD: for what does not depend on the model, as it is traced in half the time."""

    name = "linear"

    def build_model(self) -> keras.Model:
        model = keras.Sequential([keras.Input((8,), name="features"), keras.layers.Dense(1, name="size")])
        model.compile("sgd", "mse")
        return model

    def training_data(self) -> tf.data.Dataset:
        return super().training_data().map(as_it_is(_with_size))


class Noisy(Dense):
    """BatchNorm and Dropout: every replica has its own state."""

    name = "noisy"

    def build_model(self) -> keras.Model:
        features = keras.Input((8,), name="features")
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(16, activation="relu")(features))
        kind = keras.layers.Dense(3, activation="softmax")(keras.layers.Dropout(0.5)(hidden))
        model = keras.Model(features, kind)
        model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def training_data(self) -> tf.data.Dataset:
        return super().training_data().map(as_it_is(_with_kind))


class Scored(Noisy):
    """Like Noisy, with datasets for an evaluator."""

    name = "scored"

    def evaluation_data(self) -> Mapping[str, tf.data.Dataset]:
        return {"test": self.training_data().take(32)}


class Slow(Noisy):
    """Like Noisy, and slow enough to be interrupted; train it without the cache."""

    name = "slow"

    def training_data(self) -> tf.data.Dataset:
        def wait(x: Array) -> Array:
            time.sleep(0.01)
            return x

        def slowly(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), (8,)), y

        return super().training_data().map(as_it_is(slowly))


class Exploding(Noisy):
    """The 6th step ruins its weights, so that the loss is NaN from the 7th on."""

    name = "exploding"

    def build_model(self) -> keras.Model:
        model = super().build_model()
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay([4], [1e-9, 1e38])
        model.compile(keras.optimizers.SGD(schedule), "sparse_categorical_crossentropy", loss_weights=[1e6])
        return model


def run(experiment: Dense, run_dir: Path, *, progress: Any = None, **values: Any) -> TrainResult:
    """Train in this process: by default 10 steps in calls of 3, a checkpoint every 5."""
    defaults = {"steps": STEPS, "checkpoint_every": 5, "steps_per_call": 3, "tensorboard": False}
    settings = TrainSettings(run_dir=run_dir, **{**defaults, **values})
    return train(experiment, settings, progress=progress, environ={})


def interrupted(run_dir: Path, step: int, folder: Path) -> Path:
    """Return a run folder with the checkpoint of a step alone, as if the training had been killed after it."""
    name = RunDir(run_dir).checkpoint(step).name
    shutil.copytree(RunDir(run_dir).checkpoint(step), RunDir(folder).checkpoints / name)
    return folder


def weights_of(run_dir: Path, step: int) -> list[Array]:
    """Return the weights of the model published at a step."""
    model = keras.models.load_model(RunDir(run_dir).checkpoint(step) / MODEL_FILE)
    return [np.asarray(weight) for weight in model.get_weights()]


def state_of(run_dir: Path, step: int) -> dict[str, Array]:
    """Return the exact state stored at a step, by name."""
    with np.load(RunDir(run_dir).checkpoint(step) / RESUME_DIR / "state.npz") as arrays:
        return dict(arrays)


def assert_bit_equal(one: Mapping[str, Array], other: Mapping[str, Array]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name


def assert_one_architecture(run: Path) -> None:
    """Check that the evaluator sees one architecture in every checkpoint of a run, whatever process wrote it.

    Models that are built again have other names in their configs, and other memory addresses if they hold any. Those of
    two forks of one process may agree by chance, so the last checkpoint is compared with a copy that has other
    addresses, too.
    """
    run_dir = RunDir(run)
    files = [run_dir.checkpoint(step) / MODEL_FILE for step in run_dir.committed_steps()]
    with tempfile.TemporaryDirectory() as folder:
        files.append(_with_other_addresses(files[-1], Path(folder) / MODEL_FILE))
        assert len({_config_of(file) for file in files}) > 1, "all configs are equal, so this shows nothing"
        assert len({read_archive(file).fingerprint for file in files}) == 1


def _config_of(model_file: Path) -> bytes:
    with zipfile.ZipFile(model_file) as archive:
        return archive.read(CONFIG)


def _with_other_addresses(model_file: Path, copy: Path) -> Path:
    with zipfile.ZipFile(model_file) as archive, zipfile.ZipFile(copy, "w") as other:
        for name in archive.namelist():
            other.writestr(name, ADDRESS.sub(rb"\g<0>1", archive.read(name)) if name == CONFIG else archive.read(name))
    return copy


def kill_family(pid: int) -> None:
    """Kill a process and its children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def leave_none(tasks: Sequence[Task]) -> None:
    """Kill what is left of some tasks."""
    for task in tasks:
        kill_family(task.process.pid)
        task.process.wait()
        for stream in (task.process.stdout, task.process.stderr):
            if stream is not None:
                stream.close()


def tf_config(cluster: Mapping[str, Sequence[str]], role: str, index: int) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


@dataclass
class Task:
    """One task of a cluster, as a process, with the port that it serves TensorFlow's runtime on."""

    process: subprocess.Popen[str]
    port: int = 0
    again: Callable[[], Task] | None = None
    lines: list[str] = field(default_factory=list)
    errors: str = ""

    def wait_for(self, text: str) -> None:
        """Read its output until a line holds the text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError(f"it ended without printing {text!r}: {self.end()}, {self.errors}")

    def end(self) -> int:
        """Wait for its end; return its exit status."""
        output, self.errors = self.process.communicate(timeout=TIMEOUT_SECONDS)
        self.lines += output.splitlines(keepends=True)
        return self.process.returncode

    def restart(self) -> None:
        """Kill it, and restart it in the same place of its cluster."""
        assert self.again is not None
        self.kill()
        self.end()
        self.process = self.again().process

    def wait_until_it_serves(self) -> None:
        """Wait until its port takes connections."""
        ends = time.monotonic() + TIMEOUT_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
            except OSError:
                assert time.monotonic() < ends, f"nothing listens on {self.port}: {self.errors}"
                time.sleep(0.1)
            else:
                return

    def kill(self) -> float:
        """Send SIGKILL; return the time."""
        self.process.send_signal(signal.SIGKILL)
        return time.monotonic()


def start_training(
    experiment: str,
    run_dir: Path,
    *options: str,
    environ: Mapping[str, str] | None = None,
    verb: str = "train",
    inside: Sequence[str] = (),
) -> Task:
    """Run ``understudy train``, or ``run``, on one of this file's experiments, or on ``FILE:OBJECT``."""
    spec = experiment if ":" in experiment else f"{__file__}:{experiment}"
    quickly = {} if inside else preloaded()
    itself = (
        ["-B"] if "--restarts" in options else []
    )  # a supervisor starts by itself, and its tasks from what is preloaded
    command = [sys.executable, *itself, "-m", "understudy.cli", verb, spec, "--run-dir", str(run_dir)]
    return Task(
        subprocess.Popen(
            [*inside, *command, *options],
            env={**os.environ, **quickly, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ),
    )


@contextlib.contextmanager
def cluster(
    experiment: str,
    run_dir: Path,
    *options: str,
    roles: Sequence[str] = ("worker", "worker"),
    evaluator: bool = False,
    strategy: str = "multi_worker",
    verb: str = "train",
    environs: Sequence[Mapping[str, str]] = (),
) -> Iterator[list[Task]]:
    """Run a cluster of training tasks on this machine, each with its own additions to the environment.

    All of them end with the block.
    """
    ports = free_ports(len(roles) + 1)
    spec: dict[str, list[str]] = {}
    members = []
    for role, port in zip(roles, ports, strict=False):
        members.append((role, len(spec.setdefault(role, []))))
        spec[role].append(f"127.0.0.1:{port}")
    if evaluator:
        spec["evaluator"] = [f"127.0.0.1:{ports[-1]}"]
    tasks: list[Task] = []
    try:
        additions = itertools.chain(environs, itertools.repeat({}))
        for (role, index), own, port in zip(members, additions, ports, strict=False):
            environ = {"TF_CONFIG": tf_config(spec, role, index), **own}
            arguments = ("--strategy", strategy, *options)
            task = start_training(experiment, run_dir, *arguments, environ=environ, verb=verb)
            task.port = port
            task.again = functools.partial(start_training, experiment, run_dir, *arguments, environ=environ, verb=verb)
            tasks.append(task)
        yield tasks
    finally:
        leave_none(tasks)
