"""What `understudy compare` takes, and how it tells what came of it."""

from __future__ import annotations

import dataclasses
import math

import pytest
from click.testing import CliRunner

from understudy.cli.compare import print_comparison
from understudy.cli.main import main
from understudy.clients import ComparedVersion, CompareResult, EvaluateResult, LossDifference


def compared(step: int, loss: float, paired: LossDifference | None) -> ComparedVersion:
    score = EvaluateResult(
        metrics={"accuracy": 0.5, "loss": loss},
        examples=7,
        batches=2,
        step=step,
        waiting_seconds=0.0,
        computing_seconds=0.1,
        notes=("it draws",),
    )
    return ComparedVersion(score=score, differences={"accuracy": 0.0, "loss": loss - 2.0}, loss_difference=paired)


def result(*versions: ComparedVersion) -> CompareResult:
    return CompareResult(versions=versions, resamples=100, confidence=0.9, seed=0, notes=("took turns",))


@pytest.mark.parametrize(
    ("low", "high", "conclusion"),
    [(-2.0, -0.5, "is better than"), (0.5, 2.0, "is worse than"), (-1.0, 1.0, "is indistinguishable from")],
)
def test_the_interval_decides_what_is_said(
    capsys: pytest.CaptureFixture[str], low: float, high: float, conclusion: str
) -> None:
    paired = LossDifference(mean=(low + high) / 2, low=low, high=high)
    print_comparison(result(compared(10, 2.0, None), compared(20, 1.0, paired)))
    told = capsys.readouterr().out
    assert f"step 20 {conclusion} step 10" in told
    assert "90% interval" in told
    assert told.count("note: ") == 2
    assert "7 examples, compared with step 10" in told


def test_losses_that_are_not_numbers_decide_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    paired = LossDifference(mean=math.nan, low=math.nan, high=math.nan)
    print_comparison(result(compared(10, 2.0, None), compared(20, math.nan, paired)))
    told = capsys.readouterr().out
    assert "the losses of step 20 and step 10 cannot be compared: those of some examples are not finite\n" in told
    assert "indistinguishable" not in told


def test_without_an_interval_the_metrics_stand_alone(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(result(compared(10, 2.0, None), compared(20, 1.0, None)))
    told = capsys.readouterr().out
    assert "interval" not in told
    assert "-1" in told


def test_a_metric_that_one_version_has_not_has_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    lacking = compared(20, 1.0, None)
    score = dataclasses.replace(lacking.score, metrics={"loss": 1.0})
    print_comparison(
        result(compared(10, 2.0, None), dataclasses.replace(lacking, score=score, differences={"loss": -1.0}))
    )
    told = capsys.readouterr().out
    assert "nan" not in told
    assert [line.split() for line in told.splitlines() if "accuracy" in line][1] == ["20", "accuracy", "-", "-"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--versions", "1,2"], "neither FILE and --dataset"),
        (["--versions", "1,2", "--dataset", "test", "--slice", "age:30,18"], "the edges 30,18 do not ascend"),
        (["--versions", "1", "--dataset", "test"], "is one version; give two or more"),
        (["--versions", "1,newest", "--dataset", "test"], "'newest' is neither a step nor one of"),
        (["--dataset", "test"], "Missing option '--versions'"),
        (["--versions", "1,2", "--dataset", "test", "--confidence", "1"], "confidence"),
    ],
)
def test_what_is_asked_wrongly_is_said_at_once(arguments: list[str], words: str) -> None:
    told = CliRunner().invoke(main, ["compare", *arguments])
    assert told.exit_code == 2
    assert words in told.output
