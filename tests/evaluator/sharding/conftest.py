"""A published checkpoint of a real model, its data, and what one device makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from testkit import sample_models
from testkit.buckets import BucketServer, StoreServer, bucket_server, gcs_server
from testkit.checkpoints import Chief
from understudy.checkpoints.layout import MODEL_FILE, RunDir
from understudy.checkpoints.local_checkpoint import open_local_checkpoint
from understudy.checkpoints.signature import Signature
from understudy.evaluator.datasets.dataset import load_npz
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.sharding.work import DataSource, ModelSource, Work

STEP = 7
BATCH_SIZE = 8
EXAMPLES = 203
FIRST_FILE = 150
"""The examples of the first of the two files in a bucket."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Some work, and its results on one device: the score, Keras' own score, and the outputs of all examples."""

    run: Path
    file: Path
    signature: Signature
    work: Work
    score: Mapping[str, float]
    keras_score: Mapping[str, float]
    outputs: Mapping[str, np.typing.NDArray[np.float32]]


@pytest.fixture(scope="session")
def case(logical_cpus: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Score an image classifier with BatchNorm, weights and 26 batches, of which the last is smaller."""
    folder = tmp_path_factory.mktemp("sharding")
    keras.utils.clear_session(free_memory=False)
    model = sample_models.image_classifier()
    Chief(folder / "run").publish_other(STEP, model)
    published = RunDir(folder / "run").checkpoint(STEP)
    x, y, weights = sample_models.image_data(np.random.default_rng(3), EXAMPLES)
    file = folder / "data.npz"
    np.savez(file, allow_pickle=False, x=x, y=y, sample_weight=weights)

    slot = Slot(tf.distribute.MirroredStrategy([logical_cpus[0]]), published / MODEL_FILE, max_batch_size=BATCH_SIZE)
    batches = list(load_npz("data", file).batches(slot.signature, BATCH_SIZE))
    scorer = slot.scorer()
    state = scorer.start()
    outputs = []
    for batch in batches:
        state = scorer.update(state, batch, keep_outputs=True)
        outputs.append(state.outputs)
    data = [(x[i : i + BATCH_SIZE], y[i : i + BATCH_SIZE], weights[i : i + BATCH_SIZE]) for i in range(0, EXAMPLES, 8)]
    return Case(
        run=folder / "run",
        file=file,
        signature=slot.signature,
        work=Work(
            model=ModelSource(folder=published, digest=open_local_checkpoint(published).digest),
            data=DataSource(name="data", paths=(file,)),
            batch_size=BATCH_SIZE,
        ),
        score=scorer.result(state),
        keras_score=sample_models.evaluate_on_one_device(model, data),
        outputs={name: np.concatenate([each[name] for each in outputs]) for name in outputs[0]},
    )


@pytest.fixture(scope="module")
def s3() -> Iterator[BucketServer]:
    with bucket_server() as server:
        yield server


@pytest.fixture(scope="module")
def bucket(s3: BucketServer, case: Case, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of `examples_in`, on S3."""
    return examples_in(s3, case, tmp_path_factory.mktemp("records"))


@pytest.fixture(scope="module")
def google_bucket(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `examples_in`, on Google Cloud Storage."""
    with gcs_server() as server:
        yield examples_in(server, case, tmp_path_factory.mktemp("records"))


def examples_in(store: StoreServer, case: Case, folder: Path) -> str:
    """Make a bucket with the examples as ``data.npz`` and as the folder ``records``, its second file compressed."""
    url = store.make_bucket()
    store.upload(case.file, f"{url}/data.npz")
    arrays = np.load(case.file)
    write_records(folder / "a.tfrecord", arrays, slice(0, FIRST_FILE))
    write_records(folder / "b.tfrecord.gz", arrays, slice(FIRST_FILE, None), "GZIP")
    (folder / "README").write_text("no examples")
    store.upload(folder, f"{url}/records")
    store.put(f"{url}/records/old/c.tfrecord", b"not one of the folder's own files")
    return url


def write_records(file: Path, arrays: Mapping[str, Any], part: slice, compression: str | None = None) -> None:
    with tf.io.TFRecordWriter(str(file), compression) as writer:
        for x, y, weight in zip(*(arrays[key][part] for key in ("x", "y", "sample_weight")), strict=True):
            feature = {
                "x": tf.train.Feature(float_list=tf.train.FloatList(value=np.ravel(x))),
                "y": tf.train.Feature(int64_list=tf.train.Int64List(value=np.ravel(y))),
                "sample_weight": tf.train.Feature(float_list=tf.train.FloatList(value=[weight])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
