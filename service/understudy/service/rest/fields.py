"""Reads the fields of JSON objects, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.handlers.oip.inference import Parameters

_Object = Mapping[str, Any]
_LARGEST_LENGTH = 2**63 - 1


def text(owner: _Object, field: str, what: str) -> str:
    """Return a required field that must be text; raise InvalidInputError if it is not."""
    value = owner.get(field)
    if not isinstance(value, str) or not value:
        raise InvalidInputError(f"{what}: {field} is {value!r}; text was expected")
    return value


def optional_text(owner: _Object, field: str, what: str) -> str:
    """Return an optional field that must be text; raise InvalidInputError if it is not."""
    value = owner.get(field, "")
    if not isinstance(value, str):
        raise InvalidInputError(f"{what}: {field} is {value!r}; text was expected")
    return value


def integers(owner: _Object, field: str, what: str) -> Sequence[int]:
    """Return a field that must be an array of 64-bit whole numbers; raise InvalidInputError if it is not."""
    value = owner.get(field)
    if not isinstance(value, list) or not all(type(number) is int and number <= _LARGEST_LENGTH for number in value):
        raise InvalidInputError(f"{what}: {field} is {_short(value)}; an array of whole numbers was expected")
    return value


def items(owner: _Object, field: str, what: str) -> Sequence[_Object]:
    """Return an optional field that must be an array of objects; raise InvalidInputError if it is not."""
    value = owner.get(field, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidInputError(f"{what}: {field} is {_short(value)}; an array of objects was expected")
    return value


def parameters(owner: _Object, what: str) -> Parameters:
    """Return the parameters of an object; raise InvalidInputError unless they are an object of simple values."""
    value = owner.get("parameters", {})
    if not isinstance(value, dict) or not all(isinstance(each, bool | int | float | str) for each in value.values()):
        raise InvalidInputError(
            f"{what}: parameters are {_short(value)}; an object of numbers, text, true and false was expected"
        )
    return value


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 100 else f"{shown[:100]}…"  # noqa: PLR2004 - enough to match it
