"""The client's commands against a peer: what they show, to people and to programs, and how they end."""

from __future__ import annotations

import csv
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner, Result

from testkit.peer_server import STEP, Failure, Peer, Script
from understudy.cli.main import main
from understudy.service.front_end import write_address_file
from understudy.v1 import evaluation_pb2
from understudy.wire import decode

Run = Callable[..., Result]

X = np.arange(40, dtype=np.float32).reshape(10, 4)


def saved(tmp_path: Path, **arrays: Any) -> str:
    file = tmp_path / "rows.npz"
    np.savez(file, **arrays)
    return str(file)


def lines_of_json(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def refusal(result: Result, *, code: int) -> str:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    return result.stderr


def test_predict_shows_a_table(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "rows.npy"
    np.save(file, X)

    result = run("predict", str(file))

    assert result.exit_code == 0, result.output
    headings, first, *_ = result.stdout.splitlines()
    assert headings.split() == ["row", "step", "doubled"]
    assert first.split()[:2] == ["0", str(STEP)]
    assert "largest [3] = 6.0000 of [0. 2. 4. 6.]" in first


def test_arrays_without_names_go_by_their_order(run: Run, script: Script, tmp_path: Path) -> None:
    script.input_names, script.output_names = ("left", "right"), ("a", "b")
    file = tmp_path / "rows.npz"
    np.savez(file, X, X + 1, 2 * X, 3 * X)

    (predicted,) = lines_of_json(run("predict", str(file), "--json"))
    lines_of_json(run("evaluate", str(file), "--json"))

    assert predicted["outputs"] == {"doubled_left": (2 * X).tolist(), "doubled_right": (2 * X + 2).tolist()}
    scored = next(each.batch for each in script.requests if getattr(each, "batch", None) and each.batch.inputs)
    assert {name: decode(tensor)[0, 1] for name, tensor in scored.inputs.items()} == {"left": 1, "right": 2}
    assert {name: decode(tensor)[0, 1] for name, tensor in scored.targets.items()} == {"a": 2, "b": 3}


def test_predict_shows_the_first_rows_of_many_and_says_how_to_get_all(run: Run, tmp_path: Path) -> None:
    result = run("predict", saved(tmp_path, image=np.ones((30, 4), np.float32)), "--batch-size", "7")

    assert len(result.stdout.splitlines()) == 1 + 20 + 1
    assert result.stdout.endswith("and 10 more examples; --output and --json give all of them\n")


def test_predict_prints_json_by_batch(run: Run, tmp_path: Path) -> None:
    first, second = lines_of_json(run("predict", saved(tmp_path, x=X, y=X), "--batch-size", "8", "--json"))

    assert (first["step"], first["first_example"], second["first_example"]) == (STEP, 0, 8)
    assert first["outputs"]["doubled"] + second["outputs"]["doubled"] == (2 * X).tolist()


def test_predict_writes_npz_with_the_step_of_each_row(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "out.npz"

    result = run("predict", saved(tmp_path, image=X.astype(np.float64)), "--version", "80", "--output", str(output))

    assert result.exit_code == 0, result.output
    with np.load(output) as arrays:
        np.testing.assert_array_equal(arrays["doubled"], 2 * X)
        assert arrays["step"].tolist() == [80] * 10


def test_json_has_no_nan_but_says_so_in_words(run: Run, tmp_path: Path) -> None:
    (answer,) = lines_of_json(run("predict", saved(tmp_path, image=np.full((1, 2), np.nan, np.float32)), "--json"))

    assert answer["outputs"] == {"doubled": [["NaN", "NaN"]]}


def test_text_is_predicted_and_shown(run: Run, tmp_path: Path) -> None:
    file = saved(tmp_path, image=np.array(["äh", "b"]))

    assert "ähäh" in run("predict", file).stdout
    (answer,) = lines_of_json(run("predict", file, "--json"))
    assert answer["outputs"]["doubled"] == ["ähäh", "bb"]


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"picture": X}, "has the arrays ['picture']; the model also needs 'image', 'x' or 'arr_0'"),
        (
            {"image": np.float32(1)},
            "has arrays with these numbers of examples: {'image': 0}; all need the same, at least 1",
        ),
        ({"image": np.array([None])}, "is not a readable .npy or .npz file"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(
    run: Run, tmp_path: Path, arrays: dict[str, Any], complaint: str
) -> None:
    error = refusal(run("predict", saved(tmp_path, **arrays)), code=1)

    assert complaint in error
    assert error.startswith("Error: ")
    assert error.count("\n") == 1


def test_a_file_that_is_none_is_refused(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "rows.npz"
    file.write_bytes(b"PK\3\4 not really")

    assert "is not a readable .npy or .npz file" in refusal(run("predict", str(file)), code=1)
    assert "does not exist" in refusal(run("predict", "nowhere.npz"), code=2)


def test_what_the_server_refuses_is_said_in_one_line(run: Run, tmp_path: Path) -> None:
    error = refusal(run("predict", saved(tmp_path, image=X), "--version", "404"), code=1)

    assert error == "Error: no step 404; there are 80, 120\n"


def test_nobody_listening_is_said_with_the_remedy(run: Run) -> None:
    error = refusal(run("status", "--target", "127.0.0.1:1", "--timeout-seconds", "5"), code=1)

    assert error.endswith("(asked 127.0.0.1:1; --target says whom to ask, and --tls-ca that it has TLS)\n")
    assert error.count("\n") == 1


def test_a_server_that_is_too_slow_is_said_with_the_remedy(run: Run, script: Script, tmp_path: Path) -> None:
    script.gate.clear()

    error = refusal(run("predict", saved(tmp_path, image=X), "--timeout-seconds", "0.3"), code=1)

    assert error.endswith("--timeout-seconds says how long to wait)\n")


def test_one_settings_file_serves_every_command(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "understudy.toml"
    file.write_text("run_dir = 'run'\nsteps = 400\ngrpc_port = 0\n[status]\ntimeout_seconds = 5\n")
    assert run("status", "--config", str(file)).exit_code == 0

    file.write_text("grpc_prot = 0\n")
    error = refusal(run("status", "--config", str(file)), code=2)
    assert "unknown key 'grpc_prot' at the top level; did you mean grpc_port?" in " ".join(error.split())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["status", "--target", "a:1,b"], "Invalid value for '--target': expected HOST:PORT, got 'b'"),
        (["status", "--timeout-seconds", "0"], "Invalid value for '--timeout-seconds': must be more than 0, not 0.0"),
        (["predict", "--version", "newest", "x.npy"], "'newest' is neither a step nor one of serving, latest, best."),
        (["promote"], "Give exactly one of --pin, --unpin and --roll-back."),
        (["promote", "--unpin", "--roll-back"], "Give exactly one of"),
        (["evaluate"], "Got neither FILES nor --dataset; give one of them."),
        (["evaluate", "--dataset", "test", "--step", "1,x"], "expected steps separated by commas, got '1,x'"),
        (["evaluate", __file__, "--step", "1"], "--step goes with --dataset"),
        (["evaluate", __file__, "--metric", "AUC={"], "what follows AUC= is not JSON"),
        (["evaluate", "--dataset", "test", "--metric", "AUC"], "--metric goes with FILE"),
    ],
)
def test_a_command_that_is_asked_wrongly_ends_with_2(run: Run, arguments: list[str], complaint: str) -> None:
    assert complaint in " ".join(refusal(run(*arguments), code=2).split())


def test_evaluate_scores_a_file(run: Run, script: Script, tmp_path: Path) -> None:
    file = saved(tmp_path, x=X, y=2 * X + 1, sample_weight=np.ones(10, np.float32))

    shown = run("evaluate", file, "--batch-size", "4", "--metric", "accuracy", "--metric", 'AUC={"curve":"PR"}')
    (result,) = lines_of_json(run("evaluate", file, "--json", "--version", "best"))

    assert shown.stdout.splitlines()[0] == f"step {STEP}, 10 examples"
    assert "loss" in shown.stdout
    assert "note: by NumPy" in shown.stdout
    assert (result["metrics"], result["examples"], result["batches"]) == ({"loss": 1.0}, 10, 1)
    metrics = next(each for each in script.requests if isinstance(each, evaluation_pb2.EvaluateRequest)).options.metrics
    assert [(metric.name, metric.config_json) for metric in metrics] == [("accuracy", ""), ("AUC", '{"curve": "PR"}')]


def test_evaluate_names_the_targets_that_a_file_lacks(run: Run, tmp_path: Path) -> None:
    error = refusal(run("evaluate", saved(tmp_path, x=X)), code=1)

    assert "has the arrays ['x']; the model also needs 'doubled', 'y', 'targets' or 'arr_1'" in error


def test_evaluate_scores_a_dataset_of_the_server_on_several_steps(run: Run) -> None:
    results = lines_of_json(run("evaluate", "--dataset", "test", "--step", "40,80", "--json"))

    assert [(each["step"], each["dataset"], each["metrics"]) for each in results] == [
        (40, "test", {"loss": 0.5}),
        (80, "test", {"loss": 0.5}),
    ]


def test_status_shows_versions_with_their_latest_evaluations(run: Run, script: Script) -> None:
    script.record(STEP, metrics={"loss": 0.75})
    script.record(STEP, metrics={"loss": 0.5, "accuracy": 0.875})

    result = run("status")

    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "doubler",
        "step  state      role            evaluations",
        "120   AVAILABLE  serving latest  test: loss 0.5  accuracy 0.875",
        "80    END                        step 80: model.keras is cut short",
    ]


def test_status_as_json_has_the_evaluations(run: Run, script: Script) -> None:
    script.record(STEP, metrics={"loss": float("nan")})

    (status,) = lines_of_json(run("status", "--json"))

    assert (status["serving_step"], status["best_step"]) == (STEP, None)
    assert status["evaluations"][0]["metrics"] == {"loss": "NaN"}


def test_status_ends_with_1_while_nothing_is_serving(run: Run, script: Script) -> None:
    script.serving_step = None

    result = run("status")

    assert result.exit_code == 1
    assert result.stdout == "doubler: no version yet\n"


def test_promote_tells_what_is_serving(run: Run) -> None:
    assert run("promote", "--pin", "40").stdout == "serving: step 40, before it step 120; step 40 is pinned\n"
    assert run("promote", "--unpin").stdout == "serving: step 120; nothing is pinned\n"
    (promotion,) = lines_of_json(run("promote", "--roll-back", "--json"))
    assert promotion == {"serving_step": 80, "previous_step": 120, "pinned_step": 80}


def test_a_command_calls_the_model_that_it_is_given(run: Run, script: Script) -> None:
    run("status", "--model-name", "doubler")

    assert {request.model_name for request in script.requests} == {"doubler"}


def test_health_is_the_exit_status(run: Run, peer: Peer) -> None:
    healthy = run("health")
    peer.stop_serving()
    unhealthy = run("health")
    unknown = run("health", "--service", "understudy.v1.Nothing")

    assert (healthy.exit_code, healthy.stdout) == (0, "SERVING\n")
    assert (unhealthy.exit_code, unhealthy.stdout) == (1, "NOT_SERVING\n")
    assert unknown.exit_code == 1


def test_health_asks_the_server_that_wrote_the_address_file(peer: Peer, tmp_path: Path) -> None:
    port = peer.target.rpartition(":")[2]
    file = tmp_path / "address"
    write_address_file(file, f"grpc=0.0.0.0:{port} http=0.0.0.0:1")

    asked = CliRunner(env={"UNDERSTUDY_ADDRESS_FILE": str(file)}).invoke(main, ["health"])

    assert (asked.exit_code, asked.stdout) == (0, "SERVING\n"), asked.stderr


def test_health_goes_by_the_target_that_is_given(peer: Peer, tmp_path: Path) -> None:
    arguments = ["health", "--address-file", str(tmp_path / "none"), "--target", peer.target]
    assert CliRunner().invoke(main, arguments).exit_code == 0


@pytest.mark.parametrize("service", [[], ["--service", "understudy.v1.PredictionService"]])
def test_health_says_that_a_server_with_tls_does_not_answer(service: list[str], tmp_path: Path) -> None:
    file = tmp_path / "address"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    write_address_file(file, f"grpc=127.0.0.1:{port} http=[::]:{port}", tls=True)

    asked = CliRunner().invoke(main, ["health", "--address-file", str(file), "--timeout-seconds", "2", *service])

    assert asked.exit_code == 1
    assert f":{port}" in asked.stderr


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "the server does not listen yet"), ("LISTENING\n", "is no address file; expected")]
)
def test_health_says_what_is_wrong_with_the_address_file(content: str | None, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "address"
    if content is not None:
        file.write_text(content, encoding="ascii")

    asked = CliRunner().invoke(main, ["health", "--address-file", str(file)])

    assert asked.exit_code == 1
    assert reason in asked.stderr


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
    assert (first, second) == ("note: one", "note: two")
    assert [line.split()[:2] for line in lines] == [["1", "40"], ["2", "80"], ["3", "80"]]
    assert lines[0].endswith("loss 0.1  accuracy nan")
    assert lines[2].endswith("loss is 0.5")


def test_why_there_are_no_intervals_is_said_once_below_the_entries_and_with_each_that_is_watched(
    run: Run, script: Script
) -> None:
    for step in (40, 80):
        script.record(step, metrics={"loss": 0.5}, notes=["there are no intervals, because"])

    assert run("evaluations").stdout.splitlines()[3:] == ["note: there are no intervals, because"]
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


def test_status_shows_what_the_gate_said_beside_the_score(run: Run, script: Script) -> None:
    script.record(STEP, metrics={"loss": 0.5})
    script.record(STEP, outcome=evaluation_pb2.EVALUATION_OUTCOME_REFUSED, reason="loss is 0.5; at most 0.25")

    assert "test: loss 0.5; refused: loss is 0.5; at most 0.25" in run("status").stdout


def test_evaluations_shows_what_is_undefined_with_the_reason(run: Run, script: Script) -> None:
    part = evaluation_pb2.SliceScore(name="a=1", examples=2, metrics={"loss": 0.5}, undefined={"auc": "one class"})
    script.record(10, metrics={"loss": 0.5}, undefined={"auc": "no label counts"}, slices=[part])

    shown = run("evaluations").stdout
    assert "loss 0.5  auc undefined" in shown
    assert "loss 0.5  auc undefined; auc is undefined: one class" in shown
    assert shown.splitlines()[-1] == "note: auc is undefined: no label counts"
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


def test_status_shows_that_the_gate_is_undecided(run: Run, script: Script) -> None:
    script.record(STEP, metrics={"loss": 0.5})
    script.record(STEP, outcome=evaluation_pb2.EVALUATION_OUTCOME_UNDECIDED, reason="loss is 0.5, between 0.1 and 0.9")

    assert "test: loss 0.5; undecided: loss is 0.5, between 0.1 and 0.9" in run("status").stdout
    assert run("evaluations", "--outcome", "undecided").exit_code == 0
    assert script.requests[-1].outcome == evaluation_pb2.EVALUATION_OUTCOME_UNDECIDED


def test_rescore_scores_every_kept_step_on_a_new_dataset(run: Run) -> None:
    lines = run("rescore", "--since", "0", "--dataset", "fresh", "--json").stdout.splitlines()

    assert {json.loads(line)["dataset"] for line in lines} == {"fresh"}
    assert [json.loads(line)["step"] for line in lines] == [STEP]


def test_rescore_of_nothing_says_where_to_look(run: Run) -> None:
    assert "from step 100000 on that was scored" in refusal(run("rescore", "--since", "100000"), code=1)
    assert "from step 5 to 3 that was" in refusal(run("rescore", "--since", "5", "--until", "3"), code=1)


def test_replay_of_a_file_that_is_no_log_is_refused(run: Run, tmp_path: Path) -> None:
    refused = run("replay", saved(tmp_path, image=X), "--version", str(STEP))
    assert "is no request log; give the folder that --request-log names" in refusal(refused, code=1)
