"""The interface of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from understudy.experiments.arrays import IndexedExamples
    from understudy.experiments.records import RecordExamples


@runtime_checkable
class Experiment(Protocol):
    """A model and its data, for the trainer and the evaluator.

    Any class with these members works; there is no base class. It may also have ``slices``, a sequence of texts: the
    parts of the datasets to score, in addition to those of ``--slice``.

    Attributes:
        name: A short name; the default name of the served model.
        global_batch_size: Examples per training step, over all replicas of all workers.
    """

    @property
    def name(self) -> str:
        """A short name; the default name of the served model."""

    @property
    def global_batch_size(self) -> int:
        """Examples per training step, over all replicas of all workers."""

    def build_model(self) -> keras.Model:
        """Return a new model, built (its variables exist) and compiled (optimizer, loss, metrics).

        Called inside a distribution strategy's scope, and more than once.
        """

    def training_data(self) -> tf.data.Dataset | IndexedExamples | RecordExamples:
        """Return one epoch of training examples, ``(x, y)`` or ``(x, y, sample_weight)``.

        Elements are single examples: the trainer shuffles, repeats and batches. Their number is known
        (``dataset.cardinality()``). Their order is the same on every call and in every process, for exact resume.
        For data larger than memory, return `arrays.array_examples` or `records.record_examples`.
        """

    def evaluation_data(self) -> Mapping[str, tf.data.Dataset]:
        """Return the datasets to score checkpoints on, by name, in the order of scoring.

        Examples are as in `training_data`. The loss on the first dataset is monitored by default.
        """
