"""What happens to checkpoints, as events for other programs."""

from __future__ import annotations

import enum
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from understudy.checkpoints.atomic import encode_json
from understudy.evaluator.records.entries import details_of
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord


class EventType(enum.Enum):
    """What happened to a checkpoint."""

    COMMITTED = "committed"
    SCORED = "scored"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNDECIDED = "undecided"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    QUARANTINED = "quarantined"
    ROLLOUT_STARTED = "rollout_started"
    ROLLOUT_PROMOTED = "rollout_promoted"
    ROLLOUT_ROLLED_BACK = "rollout_rolled_back"
    ROLLOUT_STOPPED = "rollout_stopped"


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to one checkpoint.

    Attributes:
        type: What happened.
        step: The step of the checkpoint.
        checkpoint_digest: The SHA-256 that identifies its content.
        occurred_at: When it happened, in seconds since the epoch.
        data: The details as JSON values; numbers that JSON lacks are the strings ``"nan"``, ``"inf"`` and ``"-inf"``.
        id: Identifies the event: it has the same id each time it is delivered.
    """

    type: EventType
    step: int
    checkpoint_digest: str
    occurred_at: float
    data: Mapping[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: str(uuid.uuid4()))


_TYPES = {
    EvaluationOutcome.SCORED: EventType.SCORED,
    EvaluationOutcome.ACCEPTED: EventType.ACCEPTED,
    EvaluationOutcome.REFUSED: EventType.REFUSED,
    EvaluationOutcome.UNDECIDED: EventType.UNDECIDED,
    EvaluationOutcome.ROLLOUT_STARTED: EventType.ROLLOUT_STARTED,
    EvaluationOutcome.ROLLOUT_PROMOTED: EventType.ROLLOUT_PROMOTED,
    EvaluationOutcome.ROLLOUT_ROLLED_BACK: EventType.ROLLOUT_ROLLED_BACK,
    EvaluationOutcome.ROLLOUT_STOPPED: EventType.ROLLOUT_STOPPED,
}
_DETAILS = ("intervals", "confidence", "conditions", "undefined")


def event_of(record: EvaluationRecord, curves: Mapping[str, str]) -> Event | None:
    """Return the event of a new entry of the ledger; None if entries of its outcome have none.

    Args:
        record: The entry.
        curves: The name of the curve that the value of each metric belongs to, if it is a score.
    """
    event_type = _TYPES.get(record.outcome)
    if event_type is None:
        return None
    details = details_of(record)
    return Event(
        type=event_type,
        step=record.step,
        checkpoint_digest=record.checkpoint_digest,
        occurred_at=record.recorded_at,
        data=json_values(
            {
                "sequence": record.sequence,
                "dataset": record.dataset,
                "dataset_digest": record.dataset_digest,
                "reason": record.reason,
                "metrics": dict(record.metrics),
                "examples": record.examples,
                "duration_seconds": record.duration_seconds,
                "notes": list(record.notes),
                "curves": {metric: name for metric, name in curves.items() if name != record.dataset},
                **{name: details[name] for name in _DETAILS},
            }
        ),
    )


def json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON holds them, with strings for the numbers that JSON lacks."""
    document: dict[str, Any] = json.loads(encode_json(values))
    return document
