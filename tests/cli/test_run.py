"""What TF_CONFIG makes of ``understudy run`` before any training or serving begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from understudy.cli.main import main


def _run(tf_config: object, *arguments: str) -> Result:
    text = tf_config if isinstance(tf_config, str) else json.dumps(tf_config)
    command = ["run", "digits", "--run-dir", "unused", "--steps", "1", *arguments]
    return CliRunner().invoke(main, command, env={"TF_CONFIG": text})


def test_without_tf_config_the_other_commands_are_named() -> None:
    result = _run("")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: TF_CONFIG is unset or has no cluster, and no other variables describe one; outside a cluster, use "
        "`understudy train` or `serve`\n"
    )


@pytest.mark.parametrize(
    ("tf_config", "message"),
    [
        ("{", "TF_CONFIG is not JSON"),
        ({"cluster": {"worker": ["a:1"]}}, "task is missing"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}, "task.index is 1"),
        ({"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}}, "cluster.worker[0] is 'a'"),
        ({"cluster": {"wroker": ["a:1"]}, "task": {"type": "worker", "index": 0}}, "wroker"),
    ],
)
def test_a_malformed_tf_config_is_refused_by_field(tf_config: object, message: str) -> None:
    result = _run(tf_config)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_setting_of_a_role_that_this_task_does_not_have_need_not_be_valid(tmp_path: Path) -> None:
    """An evaluator is given the trainer's settings too, and the other way round; only its own are looked at."""
    evaluator = {"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}
    result = _run(evaluator, "--checkpoint-every", "0", "--grpc-port", "-1", "--state-dir", str(tmp_path))
    assert result.exit_code == 2
    assert "--grpc-port" in result.stderr


def test_a_bad_setting_of_this_tasks_role_is_refused_by_its_flag() -> None:
    worker = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    result = _run(worker, "--checkpoint-every", "0")
    assert result.exit_code == 2
    assert "--checkpoint-every" in result.stderr


def test_a_task_says_which_one_it_is_and_which_variables_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", "")  # and restores it
    variables = {
        "JOBSET_NAME": "digits",
        "REPLICATED_JOB_NAME": "evaluator",
        "JOB_COMPLETION_INDEX": "0",
        "UNDERSTUDY_CLUSTER_TASKS": "worker=2,evaluator=1",
    }
    arguments = ["run", "digits", "--run-dir", "unused", "--steps", "1", "--grpc-port", "-1"]
    result = CliRunner().invoke(main, [*arguments, "--state-dir", str(tmp_path)], env=variables)
    assert result.stderr.startswith(
        "this task is evaluator 0 of the cluster worker=2, evaluator=1, by the variables of"
    )
    assert "--grpc-port" in result.stderr


def test_a_fault_in_the_variables_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "")
    slurm = {"SLURM_STEP_NODELIST": "n[2-1]", "SLURM_PROCID": "0"}
    for command in ("run", "train"):
        arguments = [command, "digits", "--run-dir", "unused", "--steps", "1", "--strategy", "multi_worker"]
        result = CliRunner().invoke(main, arguments, env=slurm)
        assert result.exit_code == 1
        assert result.stderr == "Error: SLURM_STEP_NODELIST names 'n[2-1]', whose range 2-1 ends before it begins\n"
