"""Which curve each value of a score belongs to, so that no curve mixes what cannot be compared."""

from __future__ import annotations

from collections.abc import Mapping

from understudy.evaluator.types import EvaluationRecord

_DIGEST_LENGTH = 8

Firsts = Mapping[tuple[str, str], str]
"""By dataset and metric the digest of its first configuration; with an empty metric, of the first content."""


class ComparableCurves:
    """Names the curves of scores. Thread-safe, except `add`, which is for one thread at a time.

    The curves of a dataset have its name. Those of each later content of it, and of each later configuration of a
    metric, have a part of its digest after the name.

    Args:
        firsts: What was first so far.
    """

    def __init__(self, firsts: Firsts) -> None:
        self._firsts = dict(firsts)

    def firsts_of(self, record: EvaluationRecord) -> Firsts:
        """Return what is first in a score that is to be added."""
        configured = {(record.dataset, metric): own for metric, own in record.metric_digests.items() if metric and own}
        found = {(record.dataset, ""): record.dataset_digest, **configured}
        return {key: digest for key, digest in found.items() if key not in self._firsts}

    def add(self, firsts: Firsts) -> None:
        """Know from now on what was first in a score."""
        self._firsts |= firsts

    def names(self, record: EvaluationRecord) -> dict[str, str]:
        """Return the name of the curve that the value of each metric of a score belongs to, by metric."""
        content = record.dataset_digest
        is_first = self._firsts.get((record.dataset, ""), content) == content
        of_content = record.dataset if is_first else f"{record.dataset}-{content[:_DIGEST_LENGTH]}"
        return {name: self._of_configuration(of_content, record, name) for name in record.metrics}

    def _of_configuration(self, curve: str, record: EvaluationRecord, metric: str) -> str:
        own = record.metric_digests.get(metric, "")
        is_later = own != "" and self._firsts.get((record.dataset, metric), own) != own
        return f"{curve}-{own[:_DIGEST_LENGTH]}" if is_later else curve
