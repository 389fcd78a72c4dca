"""`understudy drift` over every kind of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from understudy.cli.main import main
from understudy.evaluator.datasets.request_records import LoggedRequest, encode_request

RANDOM = np.random.default_rng(3)
AGE = RANDOM.normal(40, 10, size=600).astype(np.float32)
COUNTRY = RANDOM.choice([b"FR", b"DE", b"US"], size=600).astype(object)
LABEL = RANDOM.integers(0, 3, size=600)


def npz(folder: Path, *, older_by: float = 0.0) -> Path:
    file = folder / f"older-by-{older_by}.npz"
    np.savez(file, allow_pickle=False, age=AGE + np.float32(older_by), country=COUNTRY.astype("S"), y=LABEL)
    return file


def saved(folder: Path) -> Path:
    inputs = {"age": AGE, "country": COUNTRY.astype("S")}
    tf.data.Dataset.from_tensor_slices((inputs, LABEL)).save(str(folder / "saved"))
    return folder / "saved"


def records(folder: Path) -> Path:
    def feature(value: Any) -> Any:
        if isinstance(value, bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        return tf.train.Feature(float_list=tf.train.FloatList(value=[value]))

    with tf.io.TFRecordWriter(str(folder / "data.tfrecord")) as writer:
        for age, country, label in zip(AGE, COUNTRY, LABEL, strict=True):
            features = {"age": feature(age), "country": feature(country), "y": feature(float(label))}
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    return folder / "data.tfrecord"


def request_log(folder: Path, *, redacted: tuple[str, ...] = ()) -> Path:
    scores = np.stack([AGE / 100, 1 - AGE / 100], axis=1)
    request = LoggedRequest(
        inputs={"age": AGE, "country": COUNTRY},
        outputs={"risk": scores},
        step=1,
        recorded_at=0.0,
        method="/a.Service/Predict",
        caller="",
    )
    folder = folder / "log"
    folder.mkdir()
    with tf.io.TFRecordWriter(str(folder / "requests-1.tfrecord")) as writer:
        for record in encode_request(request, redacted_names=redacted):
            writer.write(record)
    return folder


def drift(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["drift", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("form", [npz, saved, records])
def test_the_same_examples_do_not_drift_whatever_holds_them(tmp_path: Path, form: Any) -> None:
    report = drift(str(form(tmp_path)), "--against", str(npz(tmp_path)))
    assert {(each["kind"], each["name"]) for each in report["features"]} == {
        ("input", "age"),
        ("input", "country"),
        ("target", "targets"),
    }
    for each in report["features"]:
        assert each["psi"] == pytest.approx(0, abs=1e-9)
        assert each["count"] == each["reference_count"] == len(AGE)
    assert report["unmatched"] == []


def test_what_moved_is_first(tmp_path: Path) -> None:
    report = drift(str(npz(tmp_path, older_by=10.0)), "--against", str(npz(tmp_path)))
    first, *others = report["features"]
    assert first["name"] == "age"
    assert first["psi"] > 0.5
    assert first["ks"] > 0.3
    assert all(each["psi"] == 0 for each in others)


def test_a_request_log_has_scores_and_no_redacted_inputs(tmp_path: Path) -> None:
    log = str(request_log(tmp_path, redacted=("country",)))
    report = drift(log, "--against", log)
    names = {(each["kind"], each["name"]) for each in report["features"]}
    assert names == {("input", "age"), ("score", "risk[0]"), ("score", "risk[1]"), ("class", "risk")}
    report = drift(log, "--against", str(npz(tmp_path)))
    assert report["unmatched"] == ["country", "risk", "targets"]


def test_the_lone_input_of_a_log_is_that_of_a_file_with_features_and_keys(tmp_path: Path) -> None:
    log = str(request_log(tmp_path, redacted=("country",)))
    keys = np.array([f"patient {place}" for place in range(len(AGE))])
    np.savez(tmp_path / "test", allow_pickle=False, x=AGE, region=COUNTRY.astype("S"), key=keys, y=LABEL)
    data = str(tmp_path / "test.npz")

    for sample, reference, name in ((log, data, "x"), (data, log, "age")):
        report = drift(sample, "--against", reference)
        assert [(each["kind"], each["name"]) for each in report["features"]] == [("input", name)]
        assert report["features"][0]["psi"] == pytest.approx(0, abs=1e-9)
        assert report["unmatched"] == ["region", "risk", "targets"]

    report = drift(data, "--against", data)
    assert {each["name"] for each in report["features"]} == {"x", "region", "targets"}


def test_the_table_names_what_drifted(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["drift", str(npz(tmp_path, older_by=10.0)), "--against", str(npz(tmp_path))])
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if line.endswith("drifted")]
    assert line.startswith("age")


def test_the_columns_of_a_wide_table_that_are_one_feature_are_told(tmp_path: Path) -> None:
    file = tmp_path / "wide.npz"
    np.savez(file, allow_pickle=False, x=RANDOM.normal(size=(50, 40)).astype(np.float32))
    result = CliRunner().invoke(main, ["drift", str(file), "--against", str(file)])
    assert "note: the 40 values of x are one feature together, in which one that moves hardly shows" in result.output
    assert "--max-features 40" in result.output
    said = CliRunner().invoke(main, ["drift", str(file), "--against", str(file), "--max-features", "40"]).output
    assert "together" not in said


@pytest.mark.parametrize(
    ("data", "words"),
    [("train", "no file or folder; --experiment says"), ("README", "no supported format"), ("other", "in common: age")],
)
def test_what_cannot_be_compared_is_refused_with_a_sentence(tmp_path: Path, data: str, words: str) -> None:
    (tmp_path / "README").write_text("")
    np.savez(tmp_path / "other", allow_pickle=False, height=AGE)
    named = {"train": "train", "README": str(tmp_path / "README"), "other": str(tmp_path / "other.npz")}
    if data == "other":
        np.savez(tmp_path / "reference", allow_pickle=False, age=AGE, size=AGE)
        reference = tmp_path / "reference.npz"
    else:
        reference = npz(tmp_path)
    result = CliRunner().invoke(main, ["drift", named[data], "--against", str(reference)])
    assert result.exit_code == 1
    assert words in result.output


def test_saved_elements_need_no_targets(tmp_path: Path) -> None:
    tf.data.Dataset.from_tensor_slices({"age": AGE}).save(str(tmp_path / "saved"))
    result = CliRunner().invoke(main, ["drift", str(tmp_path / "saved"), "--against", str(npz(tmp_path))])
    assert result.exit_code == 0, result.output
    assert "age" in result.output
