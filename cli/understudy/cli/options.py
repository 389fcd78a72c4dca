"""Derives a command's options from its settings types, so that each setting is defined once.

A settings type is a frozen, keyword-only dataclass. Each field becomes ``--kebab-case``, the environment variable
``UNDERSTUDY_<FIELD>`` and the key ``<field>`` of the TOML file given by ``--config``, in this order of precedence, all
parsed alike. A field that is itself a settings dataclass contributes its own fields. Other fields may hold:

- ``int``, ``float``, ``str``, ``Path``, ``bool`` (``--flag/--no-flag``), ``Literal[...]``, unions of these with each
  other or ``None``;
- ``tuple[T, ...]`` of these: comma-separated (or by ``separator`` in ``metadata``), or the flag repeated;
- ``Mapping[str, T]``: ``NAME=VALUE``, likewise.

``metadata`` holds ``help`` (a sentence), and may hold ``metavar``, ``choices``, and ``url`` where a path may be a URL.
A field without a default is required. ``__post_init__`` validates by raising ValueError; where the text begins with a
field's name, the error names the flag.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar, get_type_hints

import click

from understudy.cli.config import SettingOption, config_option
from understudy.cli.values import Value, value_type

T = TypeVar("T")
R = TypeVar("R")

ENVIRONMENT_PREFIX = "UNDERSTUDY_"


def settings_options(**settings_types: type[Any]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command the options of settings types, and the settings built from them as keyword arguments.

    ``@settings_options(settings=ServeSettings)`` calls the command with ``settings=ServeSettings(...)``. A field that
    several types share becomes one option. Apply it below ``@click.command``.

    Raises:
        TypeError: A field has a type that this module does not list.
    """
    leaves = _leaves_of(settings_types)

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def with_settings(*args: Any, **given: Any) -> R:
            values = {name: leaf.combined(given.pop(name)) for name, leaf in leaves.items()}
            built = {name: _build(settings_type, values) for name, settings_type in settings_types.items()}
            return function(*args, **given, **built)

        return _with_options(with_settings, leaves)

    return decorate


def settings_makers(
    *, omit: Collection[str] = (), **settings_types: type[Any]
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command the options of settings types, and a function per type that builds the settings.

    For a command that needs only some of them, so that the others need not be valid. The functions accept fields as
    keyword arguments, which override the options. Fields in ``omit`` become no option.

    Raises:
        TypeError: A field has a type that this module does not list.
    """
    leaves = {name: leaf for name, leaf in _leaves_of(settings_types).items() if name not in omit}

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def with_makers(*args: Any, **given: Any) -> R:
            values = {name: leaf.combined(given.pop(name)) for name, leaf in leaves.items()}
            makers = {name: _maker(settings_type, values) for name, settings_type in settings_types.items()}
            return function(*args, **given, **makers)

        return _with_options(with_makers, leaves)

    return decorate


def _leaves_of(settings_types: Mapping[str, type[Any]]) -> dict[str, _Leaf]:
    return {leaf.name: leaf for settings_type in settings_types.values() for leaf in _leaves(settings_type)}


def _with_options(function: Callable[..., R], leaves: Mapping[str, _Leaf]) -> Callable[..., R]:
    decorated = config_option(next(iter(leaves.values())).flag)(function)
    for leaf in reversed(list(leaves.values())):
        decorated = leaf.option()(decorated)
    return decorated


def _maker(settings_type: type[T], values: Mapping[str, Any]) -> Callable[..., T]:
    def make(**fields: Any) -> T:
        return _build(settings_type, {**values, **fields})

    return make


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Leaf:
    """A field that holds a value, not nested settings."""

    name: str
    annotation: Any
    value: Value
    default: Any
    metadata: Mapping[str, Any]

    @property
    def flag(self) -> str:
        return _flag(self.name)

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    def option(self) -> Callable[[Callable[..., R]], Callable[..., R]]:
        """Return the decorator that gives a command this field's option."""
        attributes: dict[str, Any] = {"required": True} if self.required else {"default": self._occurrences()}
        return click.option(
            self.name,
            f"{self.flag}/--no-{self.flag.removeprefix('--')}" if self.annotation is bool else self.flag,
            cls=SettingOption,
            type=self.value.param_type,
            multiple=self.value.combine is not None,
            show_default=self.default not in (None, (), {}),
            envvar=ENVIRONMENT_PREFIX + self.name.upper(),
            help=self.metadata["help"],
            metavar=self.metadata.get("metavar"),
            **attributes,
        )

    def combined(self, given: Any) -> Any:
        """Return the field's value from click's parsed value."""
        if self.value.combine is None:
            return given
        try:
            return self.value.combine(given)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint=repr(self.flag)) from error

    def _occurrences(self) -> Any:
        return self.default if self.value.combine is None else self.value.spread(self.default)


def _leaves(settings_type: type[Any]) -> Iterator[_Leaf]:
    """Yield the fields of a settings type and of nested ones, in the order of their definition."""
    annotations = get_type_hints(settings_type)
    for field in dataclasses.fields(settings_type):
        annotation = annotations[field.name]
        if dataclasses.is_dataclass(annotation):
            yield from _leaves(annotation)  # type: ignore[arg-type]
            continue
        yield _Leaf(
            name=field.name,
            annotation=annotation,
            value=value_type(
                annotation,
                field.metadata.get("choices"),
                field.metadata.get("separator", ","),
                may_be_url=field.metadata.get("url", False),
            ),
            default=field.default if field.default_factory is dataclasses.MISSING else field.default_factory(),
            metadata=field.metadata,
        )


def _build(settings_type: type[T], values: Mapping[str, Any]) -> T:
    annotations = get_type_hints(settings_type)
    names = [field.name for field in dataclasses.fields(settings_type)]  # type: ignore[arg-type]
    arguments = {
        name: _build(annotations[name], values) if dataclasses.is_dataclass(annotations[name]) else values[name]
        for name in names
    }
    try:
        return settings_type(**arguments)
    except ValueError as error:
        raise _invalid(str(error), names) from error


def _invalid(message: str, names: list[str]) -> click.UsageError:
    first, _, rest = message.partition(" ")
    if first in names:
        return click.BadParameter(rest, param_hint=repr(_flag(first)))
    return click.UsageError(message)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
