"""Maps the type of a settings field to click's parsing."""

from __future__ import annotations

import collections.abc
import math
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin

import click

Combine = Callable[[tuple[Any, ...]], Any]
"""Builds a field's value from the parts of its flag, variable or key."""


_LARGEST: Final = 2**63 - 1
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]+://")


class LocalPath(click.Path):
    """A path on this machine: a URL would be taken for the name of a folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; see `click.Path`."""
        if _URL.match(str(value)):
            self.fail(
                f"{str(value)!r} is a URL; give a path on this machine. `understudy publish` copies a run to a bucket, "
                "and the bucket's own tools copy other files.",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


class LocalPathOrUrl(LocalPath):
    """A path on this machine, or a URL, which stays text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path or the URL."""
        return value if _URL.match(str(value)) else super().convert(value, param, ctx)


@dataclass(frozen=True, kw_only=True)
class Value:
    """How a field's value is parsed.

    Attributes:
        param_type: Parses one occurrence.
        combine: Builds one value from all occurrences; None if there can be only one, which is the value.
        spread: Splits a default value into occurrences, if ``combine`` is set.
    """

    param_type: click.ParamType[Any]
    combine: Combine | None = None
    spread: Callable[[Any], tuple[str, ...]] = tuple


def value_type(
    annotation: Any, choices: Sequence[str] | None = None, separator: str = ",", *, may_be_url: bool = False
) -> Value:
    """Return how to parse values of a resolved annotation, restricted to ``choices`` if given.

    Several values in one text are separated by ``separator``. A path that may be a URL is a `Path`, too.

    Raises:
        TypeError: `understudy.cli.options` does not list the annotation.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:  # noqa: PLR2004 - tuple[T, ...]
        return Value(param_type=_Listed(_scalar(arguments[0], choices), separator), combine=_chained)
    if origin in (collections.abc.Mapping, dict):
        pair = _Pair(_scalar(arguments[1], choices))
        return Value(param_type=_Listed(pair, separator), combine=_mapped, spread=_as_pairs)
    return Value(param_type=click.Path(path_type=Path) if may_be_url else _scalar(annotation, choices))


def _scalar(annotation: Any, choices: Sequence[str] | None) -> click.ParamType[Any]:
    if choices is not None:
        return click.Choice(list(choices))
    if get_origin(annotation) in (Union, types.UnionType):
        members = [_scalar(member, None) for member in get_args(annotation) if member is not type(None)]
        return members[0] if len(members) == 1 else _Either(members)
    if get_origin(annotation) is Literal:
        return click.Choice(list(get_args(annotation)))
    simple: dict[Any, click.ParamType[Any]] = {
        bool: click.BOOL,
        int: _WholeNumber(),
        float: _FiniteNumber(),
        str: click.STRING,
        Path: LocalPath(path_type=Path),
    }
    if annotation not in simple:
        raise TypeError(f"a setting cannot be of type {annotation}; see understudy.cli.options for those it can be of")
    return simple[annotation]


class _WholeNumber(click.types.IntParamType):
    """A whole number that TensorFlow, too, can hold."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if abs(number) > _LARGEST:
            self.fail(f"{number} is too large; give at most {_LARGEST}.", param, ctx)
        return number


class _FiniteNumber(click.types.FloatParamType):
    """A number that can be compared and waited for."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is no finite number; to wait or keep forever, give a large one.", param, ctx)
        return number


class _Either(click.ParamType[Any]):
    """A value of one of several types; the first that accepts it wins."""

    name = "value"

    def __init__(self, members: Sequence[click.ParamType[Any]]) -> None:
        # Words before numbers before any text.
        self._members = sorted(members, key=lambda member: not isinstance(member, click.Choice))

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "|".join(member.get_metavar(param, ctx) or member.name.upper() for member in self._members)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        for member in self._members:
            try:
                return member.convert(value, param, ctx)
            except click.BadParameter:
                continue
        return self.fail(f"{value!r} is none of {' or '.join(map(_described, self._members))}.", param, ctx)


class _Pair(click.ParamType[tuple[str, Any]]):
    """``NAME=VALUE``."""

    name = "name=value"

    def __init__(self, value: click.ParamType[Any]) -> None:
        self._value = value

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        name, equals, text = str(value).partition("=")
        if not (name and equals and text):
            self.fail(f"{value!r} is not of the form NAME=VALUE.", param, ctx)
        return name, self._value.convert(text, param, ctx)


class _Listed(click.ParamType[tuple[Any, ...]]):
    """Values separated by commas, or by another text. With a backslash before it, the separator is part of a value."""

    def __init__(self, item: click.ParamType[Any], separator: str) -> None:
        self._item = item
        self._separator = separator
        self.name = f"{item.name},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        parts = self._split(value) if isinstance(value, str) else [value]
        return tuple(self._item.convert(part, param, ctx) for part in parts if part != "")

    def split_envvar_value(self, rv: str) -> tuple[str, ...]:
        """Return the texts to convert: the value of the variable as it is, as `convert` splits it."""
        return (rv,)

    def _split(self, text: str) -> list[str]:
        parts = re.split(rf"(?<!\\){re.escape(self._separator)}", text)
        return [part.strip().replace(f"\\{self._separator}", self._separator) for part in parts]


def _described(member: click.ParamType[Any]) -> str:
    if isinstance(member, click.Choice):
        return ", ".join(map(repr, member.choices))
    return f"a value of type {member.name}"


def _chained(occurrences: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(item for occurrence in occurrences for item in occurrence)


def _mapped(occurrences: tuple[Any, ...]) -> dict[str, Any]:
    pairs = _chained(occurrences)
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{repeated!r} is given twice")
    return mapping


def _as_pairs(mapping: collections.abc.Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in mapping.items())
