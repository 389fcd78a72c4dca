"""Where scores of the ledger stop to be comparable with those before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.clients import Evaluation


class ComparabilityNotes:
    """Finds changes of datasets and metrics in the entries of a ledger, which come in their order."""

    def __init__(self) -> None:
        self._contents: dict[str, str] = {}
        self._configurations: dict[tuple[str, str], str] = {}

    def of(self, entry: Evaluation) -> Iterator[str]:
        """Yield a sentence for each dataset with other content than before, and each metric configured otherwise."""
        if entry.outcome != "scored":
            return
        content = entry.dataset_digest or self._contents.get(entry.dataset, "")
        if self._contents.get(entry.dataset, content) != content:
            yield _note(entry, f"{entry.dataset} has other examples")
        self._contents[entry.dataset] = content
        for metric, digest in entry.metric_digests.items():
            if self._configurations.get((entry.dataset, metric), digest) != digest:
                yield _note(entry, f"{metric} on {entry.dataset} has another configuration")
            self._configurations[entry.dataset, metric] = digest


def _note(entry: Evaluation, change: str) -> str:
    return f"from #{entry.sequence} (step {entry.step}) on, {change}; do not compare across that entry"
