"""The checkpoints that remain to be evaluated, and the leases that the evaluator holds."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator
from typing import TypeVar

from sortedcontainers import SortedDict

from understudy.evaluator.serving.backlog import Backlog
from understudy.evaluator.serving.checkpoint_store import CheckpointStore, Lease
from understudy.evaluator.serving.quarantine import Quarantine
from understudy.evaluator.types import CheckpointInfo, CheckpointKey

_NEXT_COPIES = 4
_MOST_COPIES = 64
"""The maximum number of leases that need a copy, besides the next checkpoints to evaluate."""

_T = TypeVar("_T")


class UnsettledCheckpoints:
    """The checkpoints without a score or a reason on every dataset, and the leases, by step and digest.

    All sets are kept in order and up to date: call `refresh` with the steps that changed. For one thread.

    Args:
        store: Leases checkpoints.
        quarantine: The checkpoints that may not be tried now.
    """

    def __init__(self, store: CheckpointStore, quarantine: Quarantine) -> None:
        self._store = store
        self._quarantine = quarantine
        self._all: SortedDict[CheckpointKey, CheckpointInfo] = SortedDict()
        self._waiting: SortedDict[CheckpointKey, CheckpointInfo] = SortedDict()
        self._to_link: SortedDict[CheckpointKey, CheckpointInfo] = SortedDict()
        self._to_copy: SortedDict[CheckpointKey, CheckpointInfo] = SortedDict()
        self._ready: set[CheckpointKey] = set()
        self._offered: dict[CheckpointKey, CheckpointInfo] = {}
        self._withdrawn: set[CheckpointKey] = set()
        self._leases: SortedDict[CheckpointKey, Lease] = SortedDict()
        self._idle: set[CheckpointKey] = set()

    def __bool__(self) -> bool:
        return bool(self._all)

    def __contains__(self, key: CheckpointKey) -> bool:
        return key in self._all

    def add(self, info: CheckpointInfo) -> None:
        """Add a checkpoint."""
        self._all[info.key] = info
        self._classify(info.key)

    def remove(self, key: CheckpointKey) -> None:
        """Remove a checkpoint if it is there."""
        self._all.pop(key, None)
        self._classify(key)

    def of_step(self, step: int) -> list[CheckpointInfo]:
        """Return the checkpoints of a step. There are several if it was replaced."""
        return [self._all[key] for key in _keys_of(self._all, step)]

    def steps(self) -> set[int]:
        """Return the steps of all, and of the leases. Takes time for each of them."""
        return {step for step, _ in itertools.chain(self._all, self._leases)}

    def refresh(self, step: int) -> None:
        """Apply what changed about the checkpoints of a step."""
        for key in _keys_of(self._all, step):
            self._classify(key)

    def _classify(self, key: CheckpointKey) -> None:
        info = self._all.get(key)
        waiting = info if self._quarantine.admits(key) else None
        unleased = None if key in self._leases else waiting
        needs_copy = unleased is not None and self._store.needs_copy(unleased)
        _put(self._waiting, key, waiting)
        _put(self._to_copy, key, unleased if needs_copy else None)
        _put(self._to_link, key, None if needs_copy else unleased)
        self._set_ready(key, waiting if unleased is None else None)
        (self._idle.add if info is None and key in self._leases else self._idle.discard)(key)

    def _set_ready(self, key: CheckpointKey, ready: CheckpointInfo | None) -> None:
        """Note whether a checkpoint is leased and may be tried, for the backlog if that has changed."""
        if ready is not None and key not in self._ready:
            self._ready.add(key)
            self._offered[key] = ready
        elif ready is None and key in self._ready:
            self._ready.remove(key)
            self._offered.pop(key, None)
            self._withdrawn.add(key)

    @property
    def newest(self) -> CheckpointInfo | None:
        """The newest checkpoint that may be tried now."""
        return self._waiting.peekitem()[1] if self._waiting else None

    def in_order(self) -> Iterator[CheckpointInfo]:
        """Yield the checkpoints that may be tried now, in step order; they may be removed meanwhile."""
        return _in_order(self._waiting)

    def to_lease(self) -> Iterator[CheckpointInfo]:
        """Yield the checkpoints to lease, in step order; they may be leased meanwhile.

        If a lease is a link, these are all. If it is a copy, these are the next ones to evaluate, and the newest while
        few are leased.
        """
        later = max(0, len(self._to_copy) - _NEXT_COPIES)
        newest = min(later, max(0, _MOST_COPIES - len(self._leases)))
        keys = [*self._to_copy.islice(0, _NEXT_COPIES), *self._to_copy.islice(len(self._to_copy) - newest)]
        copies = [self._to_copy[key] for key in keys]
        return heapq.merge(copies, _in_order(self._to_link), key=lambda info: info.key)

    def offer(self, backlog: Backlog) -> None:
        """Have the backlog return the leased checkpoints before the first that is still to be leased."""
        firsts = [found.peekitem(0)[0] for found in (self._to_link, self._to_copy) if found]
        backlog.update(offered=self._offered.values(), withdrawn=self._withdrawn, before=min(firsts, default=None))
        self._offered.clear()
        self._withdrawn.clear()

    def lease_of(self, key: CheckpointKey) -> Lease | None:
        """Return the lease of a checkpoint, or None."""
        lease: Lease | None = self._leases.get(key)
        return lease

    def is_leased(self, step: int) -> bool:
        """Return whether there is a lease of a step."""
        return bool(_keys_of(self._leases, step))

    def acquire(self, info: CheckpointInfo) -> None:
        """Lease a checkpoint, also one that is settled. Raises as `CheckpointStore.lease`."""
        self._leases[info.key] = self._store.lease(info)
        self._classify(info.key)

    def release(self, key: CheckpointKey) -> None:
        """Release the lease of a checkpoint."""
        self._leases.pop(key).release()
        self._classify(key)

    def idle(self, needed: Collection[CheckpointKey]) -> list[CheckpointKey]:
        """Return the leased checkpoints that are neither unsettled nor needed."""
        return [key for key in self._idle if key not in needed]


def _put(found: SortedDict[CheckpointKey, _T], key: CheckpointKey, value: _T | None) -> None:
    if value is None:
        found.pop(key, None)
    else:
        found[key] = value


def _keys_of(found: SortedDict[CheckpointKey, _T], step: int) -> list[CheckpointKey]:
    return list(found.irange((step, ""), (step + 1, ""), inclusive=(True, False)))


def _in_order(found: SortedDict[CheckpointKey, _T]) -> Iterator[_T]:
    """Yield the values in the order of their keys, of which any may be removed or added meanwhile."""
    key = next(iter(found), None)
    while key is not None:
        yield found[key]
        key = next(found.irange(key, inclusive=(False, True)), None)
