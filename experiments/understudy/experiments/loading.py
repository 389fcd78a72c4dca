"""Finds an experiment by its specification."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import operator
import sys
from pathlib import Path
from types import ModuleType
from typing import SupportsIndex

from understudy.experiments.contract import Experiment
from understudy.experiments.experiment_errors import ExperimentError, error_of_code

BUNDLED = {"digits": "understudy.experiments.digits:Digits"}
"""The bundled experiments, by name."""

_FORMS = "a bundled name ({}), package.module:object or path/to/file.py:object".format(", ".join(BUNDLED))
_MEMBERS = ("name", "global_batch_size", "build_model", "training_data", "evaluation_data")


def load_experiment(spec: str) -> Experiment:
    """Return the experiment that a specification names.

    Args:
        spec: A bundled name (``digits``), ``package.module:object`` or ``path/to/file.py:object``. The object is an
            experiment, or a class or function that returns one when called without arguments.

    Raises:
        ExperimentError: The object does not exist, raised, or is not an experiment.
    """
    place, attribute = _parsed(spec)
    module = _import_file(Path(place), spec) if place.endswith(".py") else _import_module(place, spec)
    return _as_experiment(_get_attribute(module, attribute, spec), spec)


def check_spec(spec: str) -> None:
    """Check what can be checked without running the user's code.

    Raises:
        ExperimentError: The specification has another form, or its file does not exist.
    """
    place, _ = _parsed(spec)
    if place.endswith(".py"):
        _existing(Path(place), spec)


def _parsed(spec: str) -> tuple[str, str]:
    """Return the module or file, and the object in it."""
    place, separator, attribute = BUNDLED.get(spec, spec).rpartition(":")
    if not (separator and place and attribute):
        raise ExperimentError(f"{spec!r} names no experiment; expected {_FORMS}")
    return place, attribute


def _existing(path: Path, spec: str) -> Path:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ExperimentError(f"{spec!r}: there is no file {path}; expected {_FORMS}")
    return path


def _import_module(name: str, spec: str) -> ModuleType:
    # A console script, unlike `python -m`, does not search the current folder for modules.
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ExperimentError(
                f"{spec!r}: there is no module {error.name!r}; expected {_FORMS}, installed or in this folder",
            ) from error
        raise error_of_code(repr(spec), f"importing {name}", error) from error
    except Exception as error:
        raise error_of_code(repr(spec), f"importing {name}", error) from error


def _import_file(path: Path, spec: str) -> ModuleType:
    path = _existing(path, spec)
    # Registered under its own name, so that classes defined in the file can be pickled.
    name = f"understudy_experiment_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ExperimentError(f"{spec!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    # As with `python file.py`, the file may import modules in its folder.
    _add_to_path(path.parent)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise error_of_code(repr(spec), f"running {path}", error) from error
    return module


def _add_to_path(folder: Path) -> None:
    """Append a folder to the module search path."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _get_attribute(module: ModuleType, attribute: str, spec: str) -> object:
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        names = ", ".join(name for name in vars(module) if not name.startswith("_"))
        raise ExperimentError(f"{spec!r}: the module has no {attribute!r}; it has {names}") from error


def _as_experiment(candidate: object, spec: str) -> Experiment:
    """Return the candidate, or the result of calling it."""
    if isinstance(candidate, type) or (callable(candidate) and not isinstance(candidate, Experiment)):
        try:
            candidate = candidate()
        except Exception as error:
            raise error_of_code(repr(spec), "calling it without arguments", error) from error
    missing = [member for member in _MEMBERS if not hasattr(candidate, member)]
    if missing or not isinstance(candidate, Experiment):
        raise ExperimentError(
            f"{spec!r} is a {type(candidate).__name__} without {', '.join(missing)}; "
            f"an experiment has {', '.join(_MEMBERS)} (see understudy.experiments.Experiment)",
        )
    _check_values(candidate.name, candidate.global_batch_size, spec)
    return candidate


def _check_values(name: object, size: object, spec: str) -> None:
    if not isinstance(name, str) or not name:
        raise ExperimentError(f"{spec!r}: its name is {name!r}; a text was expected")
    if isinstance(size, bool) or not isinstance(size, SupportsIndex) or operator.index(size) < 1:
        raise ExperimentError(f"{spec!r}: its global_batch_size is {size!r}; a whole number from 1 was expected")
