"""What a source of checkpoints finds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from understudy.checkpoints import Checkpoint, CheckpointSource


def polled(source: CheckpointSource, wanted: Collection[int] = ()) -> Sequence[Checkpoint]:
    """Poll a source, and return all that it has found."""
    source.poll(wanted)
    return source.found
