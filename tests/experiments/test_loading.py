"""Finding an experiment by what a user typed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from understudy.experiments import Experiment, ExperimentError, load_experiment

_SOURCE = """
class Mine:
    name = "mine"
    global_batch_size = 8

    def build_model(self): ...
    def training_data(self): ...
    def evaluation_data(self): ...

class Demanding(Mine):
    def __init__(self, argument): ...

class Incomplete:
    name = "incomplete"

    def build_model(self): ...

class Missing:
    def __init__(self):
        raise FileNotFoundError("no such data set")

instance = Mine()

def factory():
    return Mine()

class Worded(Mine):
    global_batch_size = "8"

class Halved(Mine):
    global_batch_size = 8 / 1

class Empty(Mine):
    global_batch_size = 0

class Nameless(Mine):
    name = None

number = 7
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(_SOURCE)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder, as a user does, whose modules Python does not look for by itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return tmp_path


@pytest.mark.parametrize("name", ["Mine", "instance", "factory"])
def test_a_file_gives_a_class_an_instance_or_a_function(file: Path, name: str) -> None:
    experiment = load_experiment(f"{file}:{name}")
    assert isinstance(experiment, Experiment)
    assert (experiment.name, experiment.global_batch_size) == ("mine", 8)


def test_a_relative_file_is_found_from_where_the_user_stands(file: Path, here: Path) -> None:
    assert file.parent == here
    assert load_experiment("own.py:Mine").name == "mine"


def test_a_file_may_import_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "understudy_test_helper.py").write_text(_SOURCE)
    (tmp_path / "main.py").write_text("from understudy_test_helper import Mine")
    assert load_experiment(f"{tmp_path}/main.py:Mine").name == "mine"
    monkeypatch.delitem(sys.modules, "understudy_test_helper")


def test_a_file_is_run_once(file: Path) -> None:
    assert load_experiment(f"{file}:instance") is load_experiment(f"{file}:instance")


def test_a_module_beside_the_user_is_found(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = here / "understudy_test_package"
    package.mkdir()
    (package / "own.py").write_text(_SOURCE)
    assert load_experiment("understudy_test_package.own:Mine").name == "mine"
    for module in ("understudy_test_package", "understudy_test_package.own"):
        monkeypatch.delitem(sys.modules, module)


@pytest.mark.parametrize("spec", ["", "digit", "module:", ":Mine", "own.py", "a/b.py"])
def test_what_names_nothing_is_told_what_would(spec: str) -> None:
    with pytest.raises(ExperimentError, match=r"names no experiment; expected a bundled name \(digits\)"):
        load_experiment(spec)


def test_a_missing_module_is_named() -> None:
    with pytest.raises(ExperimentError, match="there is no module 'no_such_package'"):
        load_experiment("no_such_package.module:Mine")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=rf"there is no file {tmp_path}/none\.py"):
        load_experiment(f"{tmp_path}/none.py:Mine")


def test_a_missing_object_is_told_what_there_is(file: Path) -> None:
    with pytest.raises(ExperimentError, match=r"has no 'Yours'; it has Mine, Demanding"):
        load_experiment(f"{file}:Yours")


def test_an_object_that_is_no_experiment_is_told_what_it_lacks(file: Path) -> None:
    expected = r"is a Incomplete without global_batch_size, training_data, evaluation_data"
    with pytest.raises(ExperimentError, match=expected):
        load_experiment(f"{file}:Incomplete")
    with pytest.raises(ExperimentError, match="is a int without name"):
        load_experiment(f"{file}:number")


@pytest.mark.parametrize(
    ("name", "cause", "message"),
    [("Demanding", TypeError, "missing 1 required"), ("Missing", FileNotFoundError, "no such data set")],
)
def test_a_constructor_that_raises_is_the_cause(
    file: Path,
    name: str,
    cause: type[Exception],
    message: str,
) -> None:
    with pytest.raises(
        ExperimentError, match=f"calling it without arguments raised {cause.__name__}.*{message}"
    ) as info:
        load_experiment(f"{file}:{name}")
    assert isinstance(info.value.__cause__, cause)


@pytest.mark.parametrize(
    ("source", "cause"),
    [("import no_such_library", ModuleNotFoundError), ("1 / 0", ZeroDivisionError), ("def", SyntaxError)],
)
def test_code_that_raises_is_the_cause(here: Path, source: str, cause: type[Exception]) -> None:
    (here / "understudy_test_broken.py").write_text(source)
    for spec in ("understudy_test_broken.py:Mine", "understudy_test_broken:Mine"):
        with pytest.raises(ExperimentError, match=f"raised {cause.__name__}") as info:
            load_experiment(spec)
        assert isinstance(info.value.__cause__, cause)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Worded", "global_batch_size is '8'; a whole number from 1"),
        ("Halved", "global_batch_size is 8.0; a whole number from 1"),
        ("Empty", "global_batch_size is 0; a whole number from 1"),
        ("Nameless", "name is None; a text"),
    ],
)
def test_an_experiment_whose_values_cannot_be_used_is_refused(file: Path, name: str, found: str) -> None:
    with pytest.raises(ExperimentError, match=f"{name}': its {found} was expected"):
        load_experiment(f"{file}:{name}")
