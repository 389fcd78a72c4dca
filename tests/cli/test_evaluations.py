"""``understudy evaluations``, ``watch`` and ``rescore`` against a peer server."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys

import grpc

from testkit.command_results import refusal
from testkit.peer_server import STEP, Failure, Peer, Script
from understudy.v1 import evaluation_pb2

from .conftest import Run


def test_watch_follows_until_interrupted(peer: Peer) -> None:
    peer.script.record(40, metrics={"loss": 0.5})
    command = [sys.executable, "-m", "understudy.cli", "watch", "--target", peer.target, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            first = json.loads(process.stdout.readline())
            peer.script.record(80, outcome=evaluation_pb2.EVALUATION_OUTCOME_FAILED, reason="cut short", dataset="")
            second = json.loads(process.stdout.readline())
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
            assert process.stderr.read() == ""
        finally:
            process.kill()

    assert (first["step"], first["metrics"]) == (40, {"loss": 0.5})
    assert (second["outcome"], second["reason"]) == ("failed", "cut short")


def test_watch_ends_with_1_on_what_time_does_not_mend(run: Run, script: Script) -> None:
    script.record(40, metrics={"loss": 0.5, "accuracy": 0.75})
    script.watch_breaks_after.append(1)
    script.failures.extend([Failure(code=grpc.StatusCode.UNIMPLEMENTED, message="no watching here")])

    assert refusal(run("watch"), code=1) == "Error: no watching here\n"


def recorded(script: Script) -> None:
    script.record(40, metrics={"loss": 0.1, "accuracy": float("nan")}, examples=20, notes=["one", "two"])
    script.record(80, dataset="", outcome=evaluation_pb2.EVALUATION_OUTCOME_SKIPPED, reason="too late, it seems")
    script.record(
        80, outcome=evaluation_pb2.EVALUATION_OUTCOME_REFUSED, reason="loss is 0.5", metrics={"min_value": 0.25}
    )


def test_evaluations_shows_every_entry_over_all_pages(run: Run, script: Script) -> None:
    recorded(script)

    headings, *lines, first, second = run("evaluations").stdout.splitlines()

    assert headings.split() == ["#", "step", "dataset", "outcome", "recorded", "metrics", "or", "reason"]
    assert (first, second) == ("note: test: one", "note: test: two")
    assert [line.split()[:2] for line in lines] == [["1", "40"], ["2", "80"], ["3", "80"]]
    assert lines[0].endswith("loss 0.1  accuracy nan")
    assert lines[2].endswith("loss is 0.5")


def test_why_there_are_no_intervals_is_said_once_below_the_entries_and_with_each_that_is_watched(
    run: Run, script: Script
) -> None:
    for step in (40, 80):
        script.record(step, metrics={"loss": 0.5}, notes=["there are no intervals, because"])

    assert run("evaluations").stdout.splitlines()[3:] == ["note: test: there are no intervals, because"]
    script.watch_breaks_after.append(2)
    script.failures.extend([None, Failure(code=grpc.StatusCode.UNIMPLEMENTED, message="no watching here")])
    assert run("watch").stdout.splitlines()[1::2] == 2 * ["note: there are no intervals, because"]


def test_evaluations_exports_csv_with_a_column_for_each_metric(run: Run, script: Script) -> None:
    recorded(script)

    first, second, third = csv.DictReader(run("evaluations", "--format", "csv").stdout.splitlines())

    assert (first["step"], first["metric.loss"], first["metric.accuracy"], first["notes"]) == (
        *("40", "0.1", "nan", "one | two"),
    )
    assert (second["outcome"], second["reason"], second["metric.loss"]) == ("skipped", "too late, it seems", "")
    assert (third["outcome"], third["metric.min_value"]) == ("refused", "0.25")


def test_evaluations_exports_one_json_document(run: Run, script: Script) -> None:
    assert json.loads(run("evaluations", "--format", "json").stdout) == []
    recorded(script)

    text = run("evaluations", "--format", "json").stdout

    assert [each["outcome"] for each in json.loads(text)] == ["scored", "skipped", "refused"]
    assert json.loads(text)[0]["metrics"] == {"loss": 0.1, "accuracy": "NaN"}
    assert len(text.splitlines()) == 3


def test_evaluations_hands_its_filters_to_the_server(run: Run, script: Script) -> None:
    options = ("--dataset", "test", "--min-step", "40", "--max-step", "80", "--outcome", "refused")

    assert run("evaluations", *options).exit_code == 0
    asked = script.requests[-1]
    assert (asked.dataset, asked.min_step, asked.max_step) == ("test", 40, 80)
    assert asked.outcome == evaluation_pb2.EVALUATION_OUTCOME_REFUSED


def test_evaluations_shows_what_is_undefined_with_the_reason(run: Run, script: Script) -> None:
    part = evaluation_pb2.SliceScore(name="a=1", examples=2, metrics={"loss": 0.5}, undefined={"auc": "one class"})
    script.record(10, metrics={"loss": 0.5}, undefined={"auc": "no label counts"}, slices=[part])

    shown = run("evaluations").stdout
    assert "loss 0.5  auc undefined" in shown
    assert "loss 0.5  auc undefined; auc is undefined: one class" in shown
    assert shown.splitlines()[-1] == "note: test: auc is undefined: no label counts"
    rows = list(csv.DictReader(run("evaluations", "--format", "csv").stdout.splitlines()))
    assert [(row["metric.loss"], row["metric.auc"]) for row in rows] == [("0.5", "undefined")] * 2
    assert [row["notes"] for row in rows] == ["auc is undefined: no label counts", "auc is undefined: one class"]
    (entry,) = json.loads(run("evaluations", "--format", "json").stdout)
    assert (entry["undefined"], entry["slices"][0]["undefined"]) == ({"auc": "no label counts"}, {"auc": "one class"})


def test_evaluations_says_where_the_content_of_a_dataset_changed(run: Run, script: Script) -> None:
    for step, content in ((10, "a"), (20, "a"), (10, "b"), (20, "b")):
        script.record(step, metrics={"loss": 0.5}, dataset_digest=content)

    *_, note = run("evaluations").stdout.splitlines()
    assert note == "note: from #3 (step 10) on, test has other examples; do not compare across that entry"


def test_evaluations_says_where_the_configuration_of_a_metric_changed(run: Run, script: Script) -> None:
    for step, top in ((10, ""), (20, "k=3"), (30, "k=3"), (40, "k=5")):
        script.record(step, metrics={"top": 0.5}, metric_digests={"top": top} if top else {})

    *_, note = run("evaluations").stdout.splitlines()
    expected = "note: from #4 (step 40) on, top on test has another configuration; do not compare across that entry"
    assert note == expected
    script.watch_breaks_after.append(4)
    script.failures.extend([None, Failure(code=grpc.StatusCode.UNIMPLEMENTED, message="no watching here")])
    assert run("watch").stdout.splitlines()[-1] == expected


def test_rescore_scores_again_what_was_scored(run: Run, script: Script) -> None:
    script.record(STEP, metrics={"loss": 0.25})
    script.record(STEP, dataset="removed", metrics={"loss": 0.25})

    done = run("rescore", "--since", str(STEP))
    assert done.stdout == f"step {STEP} on test: scored: loss 0.5\n"
    assert done.stderr.splitlines()[-1] == "1 scored"
    asked = script.requests[-1]
    assert (asked.dataset, asked.version.step, asked.rescore) == ("test", STEP, True)


def test_rescore_says_which_failed_evaluations_it_leaves_out(run: Run, script: Script) -> None:
    failed = {"outcome": evaluation_pb2.EVALUATION_OUTCOME_FAILED, "reason": "no column"}
    script.record(STEP, metrics={"loss": 0.25})
    script.record(STEP, dataset="fresh", **failed)
    script.record(STEP, **failed)

    said = run("rescore", "--since", str(STEP)).stderr.splitlines()
    assert said[-1] == (
        f"1 failed evaluation is left out: step {STEP} on fresh; name the dataset with --dataset to try again"
    )
    assert "left out" not in run("rescore", "--since", str(STEP), "--dataset", "fresh").stderr


def test_rescore_scores_every_kept_step_on_a_new_dataset(run: Run) -> None:
    lines = run("rescore", "--since", "0", "--dataset", "fresh", "--json").stdout.splitlines()

    assert {json.loads(line)["dataset"] for line in lines} == {"fresh"}
    assert [json.loads(line)["step"] for line in lines] == [STEP]


def test_rescore_says_what_to_name_where_all_evaluations_failed(run: Run, script: Script) -> None:
    script.record(STEP, dataset="", outcome=evaluation_pb2.EVALUATION_OUTCOME_FAILED, reason="no such loss")
    said = refusal(run("rescore", "--since", "0"), code=1)
    assert "from step 0 on that was scored; name the dataset with --dataset to score those that failed" in said


def test_rescore_of_nothing_says_where_to_look(run: Run) -> None:
    assert "from step 100000 on that was scored" in refusal(run("rescore", "--since", "100000"), code=1)
    assert "from step 5 to 3 that was" in refusal(run("rescore", "--since", "5", "--until", "3"), code=1)
