"""Which curve each value of a score belongs to, so that no curve mixes what cannot be compared."""

from __future__ import annotations

from collections.abc import Mapping

from understudy.evaluator.types import EvaluationRecord

_DIGEST_LENGTH = 8


class ComparableCurves:
    """Names the curves of scores. Call it with new scores in the order in which they are recorded.

    The curves of a dataset have its name. Those of each later content of it, and of each later configuration of a
    metric, have a part of its digest after the name.

    Args:
        contents: The first content of each dataset.
        configurations: The first configuration of each dataset's metrics.
    """

    def __init__(self, contents: Mapping[str, str], configurations: Mapping[tuple[str, str], str]) -> None:
        self._contents = dict(contents)
        self._configurations = dict(configurations)

    def names(self, record: EvaluationRecord) -> dict[str, str]:
        """Return the name of the curve that the value of each metric of a score belongs to, by metric."""
        content = record.dataset_digest
        is_first = self._contents.setdefault(record.dataset, content) == content
        of_content = record.dataset if is_first else f"{record.dataset}-{content[:_DIGEST_LENGTH]}"
        return {name: self._of_configuration(of_content, record, name) for name in record.metrics}

    def _of_configuration(self, curve: str, record: EvaluationRecord, metric: str) -> str:
        own = record.metric_digests.get(metric, "")
        is_later = own != "" and self._configurations.setdefault((record.dataset, metric), own) != own
        return f"{curve}-{own[:_DIGEST_LENGTH]}" if is_later else curve
