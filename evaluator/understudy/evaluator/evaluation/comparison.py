"""The batches and the result of a comparison of versions, and the paired bootstrap of their mean losses.

All versions are resampled alike, which makes the bootstrap paired; see `understudy.evaluator.evaluation.bootstrap`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from understudy.checkpoints.signature import Signature
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluation.bootstrap import MetricDifference, SliceDifference, draw
from understudy.evaluator.evaluation.breakdown import MAX_RESAMPLES, SEED, BreakdownOptions
from understudy.evaluator.evaluation.slices import SliceSetting
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.percentiles import bounds
from understudy.evaluator.types import Array, Batch, EvaluationResult

_CHUNK_ELEMENTS = 1_000_000
"""The number of draws made at once."""


class ReplayableBatches(Protocol):
    """Batches that can be read more than once, if that is known before the first read. Read on one thread."""

    @property
    def examples(self) -> int | None:
        """How many examples there are; None if that is not known before."""

    def first(self, signature: Signature, *, keep: bool) -> Iterator[Batch]:
        """Yield the batches; keep them for `again` if ``keep`` is true."""

    def again(self, signature: Signature) -> Iterator[Batch]:
        """Yield the batches again from the beginning."""

    def close(self) -> None:
        """Drop the kept batches. Called on the same thread, after the last read."""


class DatasetBatches:
    """The batches of a dataset, which can be read any number of times.

    Args:
        dataset: The dataset.
        batch_size: Examples per batch.
    """

    def __init__(self, dataset: EvaluationDataset, *, batch_size: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size

    @property
    def examples(self) -> int | None:
        """See `ReplayableBatches`."""
        return self._dataset.examples

    def first(self, signature: Signature, *, keep: bool) -> Iterator[Batch]:
        """See `ReplayableBatches`."""
        del keep
        return self.again(signature)

    def again(self, signature: Signature) -> Iterator[Batch]:
        """See `ReplayableBatches`."""
        return self._dataset.batches(signature, self._batch_size)

    def close(self) -> None:
        """See `ReplayableBatches`."""


@dataclass(frozen=True, kw_only=True)
class BootstrapOptions:
    """Options of the bootstrap.

    Attributes:
        resamples: The number of resamples, 1 to `MAX_RESAMPLES`.
        confidence: The share of the resampled differences inside the interval, between 0 and 1.
        seed: The seed of the draws; the same examples in the same order with the same seed give the same interval.
        slices: The slices to compare.
        slice_min_examples: Slices with fewer examples have no metrics.

    Raises:
        InvalidInputError: A value is out of its range.
    """

    resamples: int = 1000
    confidence: float = 0.95
    seed: int = SEED
    slices: tuple[SliceSetting, ...] = ()
    slice_min_examples: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.resamples <= MAX_RESAMPLES:
            raise InvalidInputError(f"{self.resamples} resamples were asked for; give 1 to {MAX_RESAMPLES}")
        self.breakdown  # noqa: B018 - checks the other values

    @property
    def breakdown(self) -> BreakdownOptions:
        """What each version is scored on."""
        return BreakdownOptions(
            slices=self.slices,
            slice_min_examples=self.slice_min_examples,
            resamples=self.resamples,
            confidence=self.confidence,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class ResampledLoss:
    """The sums of one version's per-example losses.

    Attributes:
        total: The sum over all examples.
        sums: The sums over the examples of each resample, ``[resamples]``.
        examples: The number of examples.
        counts: The number of examples of each resample, ``[resamples]``.
    """

    total: float
    sums: Array
    examples: int
    counts: Array


@dataclass(frozen=True, kw_only=True)
class LossDifference:
    """A version's mean example loss minus the first version's; below 0 is better.

    ``low`` and ``high`` bound the interval; they are infinite if too many resamples draw no example. All are NaN if the
    loss of an example is.
    """

    mean: float
    low: float
    high: float


class LossResampling:
    """Resamples the per-example losses of some versions, batch by batch. The batch boundaries do not matter.

    Args:
        options: Options of the bootstrap.
        versions: The number of versions.
    """

    def __init__(self, options: BootstrapOptions, *, versions: int) -> None:
        self._seed = options.seed
        self._resamples = options.resamples
        self._examples = 0
        self._totals = np.zeros(versions)
        self._sums = np.zeros((versions, options.resamples))
        self._counts = np.zeros(options.resamples)

    def add(self, losses: Sequence[Array]) -> None:
        """Add the losses of a batch's examples, ``[examples]`` for each version in order."""
        together = np.stack(losses)
        step = max(1, _CHUNK_ELEMENTS // self._resamples)
        with np.errstate(invalid="ignore"):  # infinite losses, also where they are not drawn
            self._totals += together.sum(axis=1)
            for start in range(0, together.shape[1], step):
                chunk = together[:, start : start + step]
                draws = draw(self._seed, self._resamples, self._examples + start, chunk.shape[1]).astype(np.float64)
                self._sums += chunk @ draws.T
                self._counts += draws.sum(axis=1)
        self._examples += together.shape[1]

    def results(self) -> list[ResampledLoss]:
        """Return the sums of each version, in order."""
        return [
            ResampledLoss(total=float(total), sums=sums, examples=self._examples, counts=self._counts)
            for total, sums in zip(self._totals, self._sums, strict=True)
        ]


def difference(of: ResampledLoss, to: ResampledLoss, *, confidence: float) -> LossDifference:
    """Return the difference of two versions' mean losses with its percentile interval.

    Both must have been resampled with the same seed on the same examples. Resamples without any example, which occur
    with very few examples, count as beyond both bounds.
    """
    mean = (of.total - to.total) / of.examples
    if math.isnan(mean):
        return LossDifference(mean=mean, low=math.nan, high=math.nan)
    with np.errstate(invalid="ignore"):
        apart = of.sums - to.sums
    resampled = np.divide(apart, of.counts, out=np.full_like(apart, np.nan), where=of.counts > 0)
    low, high = bounds(resampled, (1.0 - confidence) / 2.0) or (-math.inf, math.inf)
    return LossDifference(mean=mean, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class ComparedVersion:
    """One version compared with the first.

    Attributes:
        score: Its loss and metrics, the same as in an evaluation of this version alone.
        differences: Each metric minus the first version's; NaN if that has none, or one of another configuration.
        loss_difference: The difference of the mean example loss, with its interval; None for the first version, and if
            there are no per-example losses, or the loss of either is undefined.
        metric_differences: The differences of the metrics with their intervals; empty for the first version.
        slice_differences: The same for each slice.
    """

    score: EvaluationResult
    differences: Mapping[str, float]
    loss_difference: LossDifference | None
    metric_differences: Mapping[str, MetricDifference] = field(default_factory=dict)
    slice_differences: tuple[SliceDifference, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Versions on the same batches.

    Attributes:
        versions: The versions in the requested order; the others are compared with the first.
        bootstrap: The options of the intervals.
        notes: Why there is no interval, or why versions were scored in turn.
    """

    versions: tuple[ComparedVersion, ...]
    bootstrap: BootstrapOptions
    notes: tuple[str, ...]
