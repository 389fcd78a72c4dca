from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.trainer import TFConfigError
from understudy.trainer.tf_config import ClusterTask, parse

WORKERS = {"worker": ["a:1", "b:2"]}
CHIEF = {"chief": ["c:1"], "worker": ["a:1"]}


def config(cluster: Any = None, role: Any = "worker", index: Any = 0, **more: Any) -> dict[str, str]:
    cluster = WORKERS if cluster is None else cluster
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}, **more})}


def parsed(environ: dict[str, str]) -> ClusterTask:
    task = parse(environ)
    assert task is not None
    return task


@pytest.mark.parametrize("text", [None, "", "  ", "{}", '{"cluster": {}}', '{"task": {"type": "worker", "index": 0}}'])
def test_without_a_cluster_there_is_no_task(text: str | None) -> None:
    assert parse({} if text is None else {"TF_CONFIG": text}) is None


def test_in_a_cluster_of_workers_worker_0_is_the_chief() -> None:
    assert parsed(config()).is_chief
    assert not parsed(config(index=1)).is_chief


def test_where_there_is_a_chief_no_worker_is_it() -> None:
    assert parsed(config(CHIEF, "chief")).is_chief
    assert not parsed(config(CHIEF)).is_chief


def test_master_is_another_name_of_the_chief() -> None:
    task = parsed(config({"master": ["c:1"], "worker": ["a:1"]}, "master"))
    assert task.role == "chief"
    assert task.is_chief
    assert task.cluster["chief"] == ("c:1",)


@pytest.mark.parametrize("cluster", [CHIEF, {**CHIEF, "evaluator": ["e:1"]}])
def test_an_evaluator_may_be_in_the_cluster_or_not(cluster: Any) -> None:
    task = parsed(config(cluster, "evaluator"))
    assert task.role == "evaluator"
    assert not task.is_chief


def test_an_evaluator_may_stand_alone() -> None:
    assert parsed({"TF_CONFIG": '{"task": {"type": "evaluator", "index": 0}}'}).role == "evaluator"


def test_trainers_are_the_chief_and_then_the_workers() -> None:
    task = parsed(config({"ps": ["p:1"], "evaluator": ["e:1"], "worker": ["a:1", "b:1"], "chief": ["c:1"]}))
    assert [str(peer) for peer in task.trainers] == ["chief 0 (c:1)", "worker 0 (a:1)", "worker 1 (b:1)"]


def test_keys_of_other_dialects_are_passed_over() -> None:
    assert parsed(config(environment="cloud", job={"scale": 1})).role == "worker"


def test_an_index_may_be_a_numeral() -> None:
    assert parsed(config(index="1")).index == 1


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TF_CONFIG": "{"}, "^TF_CONFIG is not JSON"),
        ({"TF_CONFIG": "[]"}, r"^TF_CONFIG is \[\]; expected a JSON object"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "^task is missing"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}'}, r"^task\.type is missing"),
        ({"TF_CONFIG": '{"task": {"type": "worker", "index": 1}}'}, r"^cluster is missing, although task\.index is 1"),
        (config(["a:1"]), "^cluster is"),
        (config({"wroker": ["a:1"]}), "^cluster names the type 'wroker'; expected one of chief, worker"),
        (config({"worker": "a:1"}), r'^cluster\.worker is "a:1"; expected a list'),
        (config({"worker": ["a"]}), r"^cluster\.worker\[0\] is 'a'; expected host:port"),
        (config({"worker": ["a:1", "b:99999"]}), r"^cluster\.worker\[1\] is 'b:99999'"),
        (config({"worker": ["a:1", 3]}), r"^cluster\.worker\[1\] is 3"),
        (config({"worker": ["a:1", "a:1"]}), r"^cluster\.worker\[1\] is a:1, and so is cluster\.worker\[0\]"),
        (config({"chief": ["a:1", "b:1"]}, "chief"), r"^cluster\.chief has 2 addresses"),
        (config({"chief": ["a:1"], "master": ["b:1"]}, "chief"), "^cluster has both chief and master"),
        (config({"ps": ["a:1"]}, "ps"), r"^cluster\.worker is missing"),
        (config(role="boss"), r"^task\.type names the type 'boss'"),
        (config(role=["worker"]), r"^task\.type names the type \['worker'\]"),
        (config(role="chief"), r"^cluster\.chief is missing, although task\.type is 'chief'"),
        (config(index=2), r"^task\.index is 2, but cluster\.worker has 2 addresses"),
        (config(index=-1), r"^task\.index is -1"),
        (config(index=True), r"^task\.index is True"),
        (config(index="one"), r"^task\.index is 'one'"),
    ],
)
def test_an_error_names_the_field_at_fault(environ: dict[str, str], message: str) -> None:
    with pytest.raises(TFConfigError, match=message):
        parse(environ)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["worker", "a:1"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["cluster", "task", "worker", "type", "index"]), inner, max_size=4)
        ),
        max_leaves=12,
    ),
)
def test_any_json_is_either_understood_or_refused(value: Any) -> None:
    try:
        found = parse({"TF_CONFIG": json.dumps(value)})
    except TFConfigError:
        return
    assert (found is not None) == bool(value.get("cluster"))
