"""``understudy predict`` against a peer server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.command_results import lines_of_json, refusal, saved
from testkit.peer_server import STEP, Script
from understudy.cli.arrays import Examples
from understudy.wire import decode

from .conftest import Run


def inputs_of(request: Any) -> list[Any]:
    """Return the input tensors of a message of PredictStream or Evaluate."""
    holder = getattr(request, "batch", None) or getattr(request, "request", None)
    return [] if holder is None else list(holder.inputs.values())


X = np.arange(40, dtype=np.float32).reshape(10, 4)


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


def test_large_examples_are_sent_a_few_at_a_time(run: Run, script: Script, tmp_path: Path) -> None:
    file = saved(tmp_path, image=np.zeros((10, 3 << 18), np.float32), y=np.zeros((10, 1), np.float32))

    assert run("predict", file, "--output", str(tmp_path / "out.npz")).exit_code == 0
    assert run("evaluate", file, "--json").exit_code == 0

    sent = [decode(tensor) for request in script.requests for tensor in inputs_of(request)]
    assert [len(examples) for examples in sent] == [2] * 10, "five requests of 6 MiB for each command"


def test_large_examples_are_asked_about_a_few_at_a_time(run: Run, tmp_path: Path) -> None:
    """By ``drift``, whose 256 examples of a batch would be a message of 30 MiB here."""
    file = saved(tmp_path, image=np.arange(10, dtype=np.float32)[:, None] * np.ones(3 << 18, np.float32))

    shown = run("drift", file, "--against", file, "--version", "80", "--max-features", "2", "--json")

    (report,) = lines_of_json(shown)
    assert {feature["kind"] for feature in report["features"]} == {"input", "score", "class"}


def test_examples_with_large_answers_are_sent_a_few_at_a_time() -> None:
    examples = Examples(inputs={"latent": X}, targets={}, answer_bytes=3 << 20)
    assert [len(each["latent"]) for each in examples.inputs_by(256)] == [2] * 5
    assert [len(each["latent"]) for each in examples.inputs_by(1)] == [1] * 10


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
