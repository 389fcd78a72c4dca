"""Tables, reports and examples over a real channel, from the evaluation to the file."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from click.testing import CliRunner, Result
from sklearn import metrics

from testkit.checkpoints import Chief
from testkit.html_pages import Page
from testkit.in_process import RunningService, running_service
from understudy.cli.main import main
from understudy.clients import AsyncClient, Client, InvalidArgumentError, NotFoundError, OutputTask, UnavailableError
from understudy.evaluator.datasets.dataset import load_npz

pytestmark = pytest.mark.long

STEPS = (10, 20)
DATASETS = ("test", "large")
CLASSES, WIDTH, EXAMPLES = 3, 4, 90


def classifier(step: int) -> Any:
    x = keras.Input((WIDTH,), name="x")
    model = keras.Model(x, keras.layers.Dense(CLASSES, activation="softmax", use_bias=False, name="y")(x))
    random = np.random.default_rng(step)
    model.layers[-1].set_weights([random.normal(size=(WIDTH, CLASSES)).astype(np.float32)])
    model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def data() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, WIDTH)).astype(np.float32)
    return x, random.integers(0, CLASSES, EXAMPLES)


@pytest.fixture(scope="module")
def service(
    replicas: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
    data: tuple[Any, Any],
) -> Iterator[RunningService]:
    run = tmp_path_factory.mktemp("run")
    for name in DATASETS:
        np.savez(run / f"{name}.npz", x=data[0], y=data[1])
    chief = Chief(run)
    for step in STEPS:
        chief.publish_other(step, classifier(step))
    with running_service(
        {"run_dir": run, "eval_data": {name: run / f"{name}.npz" for name in DATASETS}},
        {"tables": True, "evaluation_batch_size": 32, "when_undecided": "large", "gate": ["test/accuracy >= 0"]},
        replicas=replicas,
        state_dir=run / "evaluator",
    ) as service:
        service.wait_ready()
        scored = set()
        for evaluation in service.client().watch_evaluations():
            if evaluation.outcome == "scored":
                scored.add(evaluation.step)
            if scored == set(STEPS):
                break
        service.client().evaluate_dataset("large", version=STEPS[1])
        yield service


@pytest.fixture
def client(service: RunningService) -> Client:
    return service.client()


def understudy(service: RunningService, *arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments), "--target", service.grpc])


def predictions(step: int, x: Any) -> Any:
    return classifier(step).predict(x, verbose=0)


def test_the_tables_are_those_of_the_predictions(client: Client, data: tuple[Any, Any]) -> None:
    x, actual = data
    tables = client.evaluation_tables("test", version=20)
    (output,) = tables.content["outputs"].values()
    predicted = predictions(20, x)
    assert output["confusion"] == metrics.confusion_matrix(actual, predicted.argmax(axis=1)).tolist()
    assert output["right"] / EXAMPLES == pytest.approx(tables.evaluation.metrics["accuracy"])
    for index, label in enumerate(output["labels"]):
        assert label["auc"] == pytest.approx(metrics.roc_auc_score(actual == index, predicted[:, index]), abs=1e-3)


def test_the_metadata_say_what_an_output_is_for(client: Client) -> None:
    assert client.metadata(version=20).output_tasks == {"y": OutputTask(kind="multiclass", threshold=0.0)}


def test_the_hardest_examples_have_their_losses_and_inputs(client: Client, data: tuple[Any, Any]) -> None:
    x, actual = data
    losses = -np.log(predictions(20, x)[np.arange(EXAMPLES), actual])
    hardest = client.examples("hardest", version=20, max_examples=7)
    assert list(hardest.indices) == np.argsort(-losses, kind="stable")[:7].tolist()
    assert [one["loss"] for one in hardest.described] == pytest.approx(np.sort(losses)[::-1][:7], rel=1e-5)
    assert np.array_equal(hardest.inputs["x"], x[list(hardest.indices)])
    assert np.array_equal(hardest.targets["targets"], actual[list(hardest.indices)])
    assert (hardest.total, hardest.baseline, hardest.notes) == (EXAMPLES, None, ())


def test_flips_are_the_examples_that_two_versions_decide_differently(client: Client, data: tuple[Any, Any]) -> None:
    x, actual = data
    before, after = (predictions(step, x).argmax(axis=1) == actual for step in STEPS)
    wrong = client.examples("newly_wrong", version=20, baseline=10)
    right = client.examples("newly_right", version=20, baseline=10)
    assert list(wrong.indices) == np.flatnonzero(before & ~after).tolist()
    assert list(right.indices) == np.flatnonzero(after & ~before).tolist()
    assert wrong.flips is not None
    assert (wrong.flips.newly_wrong, wrong.flips.newly_right) == (wrong.total, right.total)
    assert wrong.flips.both_right == (before & after).sum()
    first, second = (predictions(step, x).argmax(axis=1) for step in STEPS)
    for found in (wrong, right):
        assert [each["outputs"]["y"] for each in found.described] == [
            {"actual": [actual[index]], "predicted": [second[index]], "baseline": [first[index]]}
            for index in found.indices
        ]


async def test_the_asyncio_client_answers_the_same(client: Client, service: RunningService) -> None:
    async with AsyncClient(service.grpc) as other:
        assert await other.evaluation_tables(version=10) == client.evaluation_tables(version=10)
        examples = await other.examples("newly_right", version=20, baseline=10)
    assert examples.indices == client.examples("newly_right", version=20, baseline=10).indices


def test_a_report_is_a_page_of_one_version_or_of_two(service: RunningService, tmp_path: Path) -> None:
    for name, arguments in (("one", ("--step", "10")), ("two", ("--compare", "10,20"))):
        file = tmp_path / f"{name}.html"
        result = understudy(service, "report", *arguments, "--output", file)
        assert result.exit_code == 0, result.output
        page = Page(file.read_text())
        assert page.references == []
        assert set(page.tables) == {1}
        assert any(heading.startswith("Changed examples") for heading in page.headings)
    assert "What was predicted for examples that are newly wrong" in page.text


def test_the_page_says_what_was_predicted_for_changed_examples(service: RunningService, client: Client) -> None:
    (first, *_) = client.examples("newly_wrong", version=20, baseline=10).indices
    with urllib.request.urlopen(f"http://{service.http}/compare?first=10&second=20", timeout=20) as response:
        text = response.read().decode()
    assert "What was predicted for the first changed examples" in text
    assert f'<tr><th scope="row">{first}</th>' in text


def test_a_report_is_data_too(service: RunningService, client: Client, tmp_path: Path) -> None:
    result = understudy(service, "report", "--compare", "10,20", "--output", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [one["evaluation"]["step"] for one in report["versions"]] == list(STEPS)
    assert report["versions"][0]["tables"] == client.evaluation_tables(version=10).content
    wrong = client.examples("newly_wrong", version=20, baseline=10)
    assert report["changes"]["newly_wrong"] == list(wrong.indices)
    assert report["changes"]["described"]["newly_wrong"][0] == {"index": wrong.indices[0], **wrong.described[0]}


def test_a_report_names_the_datasets_that_only_one_version_has_a_score_on(
    service: RunningService, tmp_path: Path
) -> None:
    note = "large is left out: step 20 has a score on it, and step 10 has none"
    for suffix in ("html", "json"):
        file = tmp_path / f"report.{suffix}"
        assert understudy(service, "report", "--compare", "10,20", "--output", file).exit_code == 0
        assert (
            (note in Page(file.read_text()).text)
            if suffix == "html"
            else [note] == json.loads(file.read_text())["notes"]
        )
    with urllib.request.urlopen(f"http://{service.http}/compare?first=10&second=20", timeout=20) as response:
        assert "Step 20 has a score on this dataset and step 10 has none" in response.read().decode()


@pytest.fixture
def held_back(replicas: tuple[str, ...], tmp_path: Path, data: tuple[Any, Any]) -> Iterator[RunningService]:
    """A service whose gate holds back its two versions, of which one at a time is loaded."""
    np.savez(tmp_path / "test.npz", x=data[0], y=data[1])
    for step in STEPS:
        Chief(tmp_path).publish_other(step, classifier(step))
    with running_service(
        {"run_dir": tmp_path, "eval_data": {"test": tmp_path / "test.npz"}},
        {"tables": True, "gate": ["test/accuracy >= 2"]},
        replicas=replicas,
        state_dir=tmp_path / "evaluator",
    ) as service:
        refused = (each.step for each in service.client().watch_evaluations() if each.outcome == "refused")
        assert {next(refused), next(refused)} == {*STEPS}
        yield service


async def test_a_version_that_a_gate_holds_back_has_a_report_and_answers_where_it_is_named(
    held_back: RunningService, tmp_path: Path, data: tuple[Any, Any]
) -> None:
    result = understudy(held_back, "report", "--step", "10", "--output", tmp_path / "report.html")
    assert result.exit_code == 0, result.output
    text = Page((tmp_path / "report.html").read_text()).text
    assert "No version is serving yet, so there is none to compare with." in text
    for arguments in (
        ("report", "--compare", "10,20", "--output", tmp_path / "report.html"),
        ("report", "--compare", "20,10", "--output", tmp_path / "report.html"),
        *(("examples", "hardest", "--step", step) for step in STEPS),
        ("examples", "newly-wrong", "--step", 10, "--baseline", 20),
    ):
        result = understudy(held_back, *map(str, arguments))
        assert result.exit_code == 0, result.output
    result = understudy(held_back, "examples", "hardest")
    assert "Name the step to use it all the same, 20, or have it served (promote --pin 20)" in result.output
    scored = held_back.client().evaluate([data], version=10)
    assert scored.examples == EXAMPLES
    async with AsyncClient(held_back.grpc) as other:
        assert (await other.evaluate([data], version=10)).metrics == scored.metrics
        assert (await other.predict(data[0], version=10)).step == 10
    with pytest.raises(UnavailableError, match="no checkpoint is serving yet"):
        held_back.client().predict(data[0])


def test_examples_are_listed_and_exported(service: RunningService, data: tuple[Any, Any], tmp_path: Path) -> None:
    arguments = ("examples", "newly-wrong", "--step", "20", "--baseline", "10")
    listed = understudy(service, *arguments)
    assert listed.exit_code == 0, listed.output
    assert "McNemar" in listed.output
    assert "y.baseline" in listed.output
    for suffix in ("json", "csv", "npz"):
        assert understudy(service, *arguments, "--output", tmp_path / f"worse.{suffix}").exit_code == 0
    examples = json.loads((tmp_path / "worse.json").read_text())["examples"]
    indices = [one["index"] for one in examples]
    assert examples[0]["inputs"]["x"] == pytest.approx(data[0][indices[0]].tolist())
    lines = (tmp_path / "worse.csv").read_text().splitlines()
    assert lines[0] == "example,y.actual,y.predicted,y.baseline,inputs.x,targets.targets"
    assert examples[0]["outputs"]["y"].keys() == {"actual", "predicted", "baseline"}
    assert len(lines) == 1 + len(examples)
    dataset = load_npz("worse", tmp_path / "worse.npz")
    with np.load(tmp_path / "worse.npz") as written:
        assert np.array_equal(written["x"], data[0][indices])
    assert dataset.examples == len(examples)


def test_what_is_not_there_is_named(service: RunningService, client: Client, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"step 7 has no score on 'test'\. There are tables of the steps 10, 20"):
        client.evaluation_tables(version=7)
    with pytest.raises(NotFoundError, match=r"there is no dataset 'tset'; there are \['test', 'large'\]"):
        client.evaluation_tables("tset", version=10)
    with pytest.raises(InvalidArgumentError, match="compared with itself"):
        client.examples("newly_wrong", version=20, baseline=20)
    with pytest.raises(InvalidArgumentError, match="ask for 1 to 1000"):
        client.examples("hardest", version=20, max_examples=1001)
    missing = understudy(service, "report", "--step", "7", "--output", tmp_path / "report.html")
    assert (missing.exit_code, "step 7 has no score" in missing.output) == (1, True)
    assert not (tmp_path / "report.html").exists()
    for arguments in (
        ("report", "--step", "1", "--compare", "1,2", "--output", "a.html"),
        ("report", "--output", "a.pdf"),
        ("report", "--compare", "1,2,3", "--output", "a.html"),
        ("examples", "hardest", "--baseline", "10"),
    ):
        assert understudy(service, *arguments).exit_code == 2
