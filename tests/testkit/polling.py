"""What a source of checkpoints finds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from understudy.checkpoints import Checkpoint, CheckpointSource


def polled(source: CheckpointSource, wanted: Collection[int] = ()) -> Sequence[Checkpoint]:
    """Poll a source, and return all that it has found."""
    source.poll(wanted)
    return source.found


def poll_all(source: CheckpointSource) -> Sequence[Checkpoint]:
    """Poll a source until it has looked at everything, and return all that it has found."""
    found = polled(source)
    while not source.is_complete:
        found = polled(source)
    return found


def steps_of(source: CheckpointSource) -> list[int]:
    """Poll a source, and return the steps of all that it has found."""
    return [checkpoint.step for checkpoint in polled(source)]
