"""What was found is remembered for the same model, machine and versions."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.tuning import tuning_file
from understudy.evaluator.tuning.choice import FoundSettings, Threads
from understudy.evaluator.tuning.tuning_file import TUNING_FILE, Conditions, TuningFile, TuningStart

FOUND = FoundSettings(
    threads=Threads(intra_op=1, inter_op=2), max_batch_size=512, gathering_seconds=0.002, concurrent_batches=2
)
OTHER = FoundSettings(max_batch_size=64)
HERE = Conditions(digest="here")


def test_what_was_found_is_read_again(tmp_path: Path) -> None:
    TuningFile(tmp_path, HERE).remember("mlp", FOUND)

    again = TuningFile(tmp_path, HERE)

    assert again.find("mlp") == FOUND
    assert again.last() == FOUND
    assert again.find("lstm") is None


def test_other_conditions_know_nothing_of_it(tmp_path: Path) -> None:
    TuningFile(tmp_path, HERE).remember("mlp", FOUND)

    elsewhere = TuningFile(tmp_path, Conditions(digest="elsewhere"))

    assert elsewhere.find("mlp") is None
    assert elsewhere.last() is None
    elsewhere.remember("mlp", OTHER)
    assert TuningFile(tmp_path, HERE).find("mlp") == FOUND, "both are kept"


def test_the_model_that_was_served_last_is_expected_next(tmp_path: Path) -> None:
    file = TuningFile(tmp_path, HERE)
    file.remember("mlp", FOUND)
    file.remember("lstm", OTHER)
    assert file.last() == OTHER

    file.remember("mlp", FOUND)

    assert file.last() == FOUND
    assert file.find("lstm") == OTHER


def test_the_file_does_not_grow_without_end(tmp_path: Path) -> None:
    file = TuningFile(tmp_path, HERE)
    for number in range(100):
        file.remember(f"model {number}", OTHER)

    assert file.find("model 99") == OTHER
    assert file.find("model 0") is None


def entry(**changed: str) -> str:
    """Return the text of a file with one entry."""
    fields = {"threads": "{}", "max_batch_size": "64", "gathering_seconds": "0.0", "concurrent_batches": "1"}
    fields |= changed
    found = ", ".join(f'"{name}": {value}' for name, value in fields.items())
    return f'{{"format": 2, "found": [{{"architecture": "mlp", "conditions": "here", {found}}}]}}'


def test_an_entry_within_the_bounds_is_read(tmp_path: Path) -> None:
    (tmp_path / TUNING_FILE).write_text(entry(), encoding="utf-8")

    assert TuningFile(tmp_path, HERE).last() == FoundSettings(max_batch_size=64)


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", "[" * 100_000, '{"format": 2}', '{"format": 99, "found": []}'),
        '{"format": 2, "found": [{"threads": 1}]}',
        *(entry(max_batch_size=size) for size in ("0", "-1", "1000000000", "1e999")),
        *(entry(gathering_seconds=seconds) for seconds in ("-1", "1000", "NaN")),
        *(entry(concurrent_batches=number) for number in ("0", "3", "null")),
        *(entry(threads=threads) for threads in ('{"intra_op": 0}', '{"inter_op": 1000000}', '{"other": 1}')),
    ],
    ids=lambda content: content[-60:],
)
def test_a_file_that_cannot_be_read_counts_as_empty_and_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / TUNING_FILE).write_text(content, encoding="utf-8")
    file = TuningFile(tmp_path, HERE)

    assert file.last() is None
    file.remember("mlp", FOUND)
    assert file.find("mlp") == FOUND


def test_conditions_change_with_the_machine_and_the_given_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EvaluatorSettings(state_dir=tmp_path)
    here = Conditions.of(settings)
    assert Conditions.of(settings) == here
    assert Conditions.of(replace(settings, intra_op_threads=1)) != here
    assert Conditions.of(replace(settings, logical_cpus=2)) != here
    assert Conditions.of(replace(settings, concurrent_batches=1)) != here

    monkeypatch.setattr(tuning_file, "usable_cores", lambda: 77)

    assert Conditions.of(settings) != here


def test_tensorflow_may_have_another_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"tensorflow-cpu": "2.21.0"}
    present = metadata.version

    def version(name: str) -> str:
        if name == "tensorflow":
            raise metadata.PackageNotFoundError(name)
        return installed.get(name) or present(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"tensorflow": ["tensorflow-cpu"]})
    settings = EvaluatorSettings(state_dir=tmp_path)
    before = Conditions.of(settings)

    installed["tensorflow-cpu"] = "2.21.1"

    assert Conditions.of(settings) != before


def test_self_tuning_can_be_ruled_out(tmp_path: Path) -> None:
    settings = EvaluatorSettings(state_dir=tmp_path, self_tuning=False)
    assert TuningStart.read(settings, None) is None


def test_a_service_starts_with_what_was_found_last(tmp_path: Path) -> None:
    settings = EvaluatorSettings(state_dir=tmp_path)
    TuningFile(tmp_path, Conditions.of(settings)).remember("mlp", FOUND)

    start = TuningStart.read(settings, "digits")

    assert start is not None
    assert start.found == FOUND
    assert start.experiment == "digits"
