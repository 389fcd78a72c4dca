"""The client's commands against a peer: what they show, to people and to programs, and how they end."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest

from testkit.command_results import lines_of_json, refusal, saved
from testkit.peer_server import STEP, Failure, Script
from understudy.v1 import evaluation_pb2, model_pb2, tensor_pb2

from .conftest import Run

X = np.arange(40, dtype=np.float32).reshape(10, 4)


def test_what_the_server_refuses_is_said_in_one_line(run: Run, tmp_path: Path) -> None:
    error = refusal(run("predict", saved(tmp_path, image=X), "--version", "404"), code=1)

    assert error == "Error: no step 404; there are 80, 120\n"


def test_nobody_listening_is_said_with_the_remedy(run: Run) -> None:
    error = refusal(run("status", "--target", "127.0.0.1:1", "--timeout-seconds", "5"), code=1)

    assert error.endswith("(asked 127.0.0.1:1; --target says whom to ask, and --tls-ca that it has TLS)\n")
    assert error.count("\n") == 1


def test_a_proxy_that_cannot_reach_the_server_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")

    error = refusal(run("status", "--target", "models.example:8500", "--timeout-seconds", "5"), code=1)

    assert error.endswith("and no_proxy which hosts to call without the proxy of https_proxy)\n")


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


def test_a_version_that_is_not_loaded_is_scored_while_none_is_serving(run: Run, script: Script, tmp_path: Path) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.NOT_FOUND))

    (result,) = lines_of_json(run("evaluate", saved(tmp_path, x=X, y=2 * X + 1), "--json", "--version", "40"))

    assert result["metrics"] == {"loss": 1.0}
    asked = [each for each in script.requests if isinstance(each, model_pb2.GetModelMetadataRequest)]
    assert [each.version.label for each in asked] == [0, tensor_pb2.VERSION_LABEL_LATEST]  # needs no serving version


def test_whether_a_file_needs_targets_is_for_the_server_to_say(run: Run, tmp_path: Path) -> None:
    error = refusal(run("evaluate", saved(tmp_path, x=X)), code=1)

    assert "Error: there are no targets" in error


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


@pytest.mark.parametrize("scored_last", [True, False])
def test_status_shows_that_a_checkpoint_failed_to_load_until_it_is_scored(
    run: Run, script: Script, *, scored_last: bool
) -> None:
    failed = evaluation_pb2.EVALUATION_OUTCOME_FAILED
    script.record(STEP, dataset="", outcome=failed, reason="no such loss")
    script.record(STEP, metrics={"loss": 0.5})
    if not scored_last:
        script.record(STEP, dataset="", outcome=failed, reason="no such loss")
    assert ("no such loss" in run("status").stdout) is not scored_last


def test_status_says_on_which_dataset_an_evaluation_failed(run: Run, script: Script) -> None:
    script.record(STEP, dataset="big", outcome=evaluation_pb2.EVALUATION_OUTCOME_FAILED, reason="no column")
    script.record(STEP, dataset="big", outcome=evaluation_pb2.EVALUATION_OUTCOME_REFUSED, reason="too low")
    assert run("status").stdout.splitlines()[2].endswith("  big: failed: no column; refused: too low")


def test_people_are_told_how_what_failed_is_scored_after_a_restart(run: Run, script: Script) -> None:
    failed = {"outcome": evaluation_pb2.EVALUATION_OUTCOME_FAILED, "reason": "no column"}
    for step, dataset in ((STEP, "my test"), (80, "my test"), (80, "mended"), (80, "")):
        script.record(step, dataset=dataset, **failed)
    script.record(80, dataset="mended", metrics={"loss": 0.5})

    told = "note: with the cause gone and the server started again, this scores what failed: "
    told += "understudy rescore --since 80 --dataset 'my test'"
    for command in ("status", "evaluations"):
        assert [line for line in run(command).stdout.splitlines() if "rescore" in line] == [told]
    assert "rescore" not in run("evaluations", "--format", "csv").stdout


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
    assert run("promote", "--pin", str(STEP)).stdout == f"serving: step {STEP}; step {STEP} is pinned\n"
    assert run("promote", "--unpin").stdout == "serving: step 120; nothing is pinned\n"
    (promotion,) = lines_of_json(run("promote", "--roll-back", "--json"))
    assert promotion == {"serving_step": 80, "previous_step": 120, "pinned_step": 80}


def test_a_command_calls_the_model_that_it_is_given(run: Run, script: Script) -> None:
    run("status", "--model-name", "doubler")

    assert {request.model_name for request in script.requests} == {"doubler"}


def test_status_shows_what_the_gate_said_beside_the_score(run: Run, script: Script) -> None:
    script.record(STEP, metrics={"loss": 0.5})
    script.record(STEP, outcome=evaluation_pb2.EVALUATION_OUTCOME_REFUSED, reason="loss is 0.5; at most 0.25")

    assert "test: loss 0.5; refused: loss is 0.5; at most 0.25" in run("status").stdout


def test_status_shows_that_the_gate_is_undecided(run: Run, script: Script) -> None:
    script.record(STEP, metrics={"loss": 0.5})
    script.record(STEP, outcome=evaluation_pb2.EVALUATION_OUTCOME_UNDECIDED, reason="loss is 0.5, between 0.1 and 0.9")

    assert "test: loss 0.5; undecided: loss is 0.5, between 0.1 and 0.9" in run("status").stdout
    assert run("evaluations", "--outcome", "undecided").exit_code == 0
    assert script.requests[-1].outcome == evaluation_pb2.EVALUATION_OUTCOME_UNDECIDED


def test_replay_of_a_file_that_is_no_log_is_refused(run: Run, tmp_path: Path) -> None:
    refused = run("replay", saved(tmp_path, image=X), "--version", str(STEP))
    assert "is no request log; give the folder that --request-log names" in refusal(refused, code=1)
