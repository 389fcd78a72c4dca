from __future__ import annotations

import dataclasses
from typing import Any

from understudy.clients import responses
from understudy.evaluator.types import (
    EvaluationOutcome,
    EvaluationRecord,
    EvaluationResult,
    GateCondition,
    Interval,
    SliceScore,
)
from understudy.service.handlers import messages

_PARTS: dict[str, Any] = {
    "intervals": {"loss": Interval(low=0.1, high=0.5)},
    "slices": (
        SliceScore(name="label=3", examples=5, metrics={"loss": 0.3}, intervals={"loss": Interval(low=0.2, high=0.4)}),
        SliceScore(name="age=[18,30)", examples=1, notes=("fewer than 5 examples",)),
        SliceScore(name="label=4", examples=5, undefined={"auc": "no label that counts is positive"}),
    ),
    "undefined": {"auc": "no label counts"},
    "resamples": 200,
    "confidence": 0.9,
}


def test_a_client_reads_the_slices_intervals_and_conditions_that_a_server_sends() -> None:
    condition = GateCondition(
        text="test/loss not worse by 0.1 at 90%",
        outcome=EvaluationOutcome.UNDECIDED,
        value=0.3,
        baseline_step=0,
        baseline_value=0.0,
        interval=Interval(low=-0.3, high=0.2),
        reason="too few examples",
    )
    plain = GateCondition(text="test/loss <= 1", outcome=EvaluationOutcome.ACCEPTED, value=0.3)
    record = EvaluationRecord(
        sequence=1,
        step=3,
        checkpoint_digest="d3",
        dataset="test",
        outcome=EvaluationOutcome.UNDECIDED,
        dataset_digest="content",
        metric_digest="metrics",
        metric_digests={"loss": "squares"},
        conditions=(condition, plain),
        **_PARTS,
    )
    read = dataclasses.asdict(responses.evaluation(messages.record(record)))
    sent = dataclasses.asdict(record)
    for each in (sent, *sent["conditions"]):
        each["outcome"] = each["outcome"].value
    del read["recorded_at"], sent["recorded_at"]
    assert read == sent


def test_a_client_reads_the_slices_and_intervals_of_a_score() -> None:
    result = EvaluationResult(
        metrics={"loss": 0.3}, examples=9, batches=2, step=3, waiting_seconds=0.1, computing_seconds=0.2, **_PARTS
    )
    sent = dataclasses.asdict(result)
    del sent["resampled"], sent["metric_digests"]
    assert dataclasses.asdict(responses.score(messages.score(result))) == sent
