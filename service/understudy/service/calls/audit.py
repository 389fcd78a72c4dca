"""The audit log: who changed what is served, what the gate and a rollout decided, and who was refused.

Its lines have the logger name ``understudy.audit`` and are written at every ``--log-level``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import structlog

from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord
from understudy.service.calls.status import Code, Failure

if TYPE_CHECKING:
    from understudy.service.calls.served_call import Call

AUDIT_LOGGER: Final = "understudy.audit"
REFUSAL: Final = "caller refused"
"""The event of the audit log's lines about refused callers, which have the address as ``peer``, and the ``method``."""

_DECISIONS: Final = frozenset({EvaluationOutcome.ACCEPTED, EvaluationOutcome.REFUSED, EvaluationOutcome.UNDECIDED})
_ROLLOUTS: Final = frozenset(
    {
        EvaluationOutcome.ROLLOUT_STARTED,
        EvaluationOutcome.ROLLOUT_PROMOTED,
        EvaluationOutcome.ROLLOUT_ROLLED_BACK,
        EvaluationOutcome.ROLLOUT_STOPPED,
    }
)
_REFUSED: Final = frozenset({Code.PERMISSION_DENIED, Code.UNAUTHENTICATED})

_audit_log = structlog.wrap_logger(
    None, wrapper_class=structlog.make_filtering_bound_logger(logging.INFO), logger_factory_args=(AUDIT_LOGGER,)
)


def audit_call(call: Call, method: str, failure: Failure | None) -> None:
    """Write the line of a call that ended, if it decides something or was refused.

    Args:
        call: The call.
        method: Its path.
        failure: Why it failed, or None.
    """
    refused = failure is not None and failure.code in _REFUSED
    if call.audited is None and not refused:
        return
    fields = dict(call.audited or {})
    event = fields.pop("event", "serving version requested")
    _audit_log.info(
        REFUSAL if refused else event,
        caller="" if call.caller is None else call.caller.name,
        certificate=", ".join(call.certificate_names()),
        peer=call.peer,
        method=method,
        **fields,
        outcome=Code.OK.name if failure is None else failure.code.name,
        message="" if failure is None else failure.message,
        request_id=call.request_id,
    )


def audit_refused_request(peer: str, path: str, message: str) -> None:
    """Write the line of an HTTP request that was refused before it became a call.

    Args:
        peer: The address of the caller.
        path: What it asked for.
        message: Why it was refused.
    """
    _audit_log.info(
        REFUSAL,
        caller="",
        certificate="",
        peer=peer,
        path=path,
        outcome=Code.PERMISSION_DENIED.name,
        message=message,
    )


def audit_record(record: EvaluationRecord) -> None:
    """Write the line of an entry of the ledger, if it is a decision of the gate or a step of a rollout."""
    if record.outcome in _ROLLOUTS:
        event, about = "rollout", {"notes": "; ".join(record.notes)}
    elif record.outcome in _DECISIONS:
        event, about = "gate decided", {"dataset": record.dataset}
    else:
        return
    _audit_log.info(
        event,
        step=record.step,
        checkpoint_digest=record.checkpoint_digest,
        **about,
        outcome=record.outcome.value,
        message=record.reason,
        metrics=dict(record.metrics),
        sequence=record.sequence,
    )
