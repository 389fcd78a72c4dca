"""Reads settings from a TOML file.

Top-level keys apply to every command that has a setting of that name. Keys in a table named after a command apply to
that command and take precedence. A key that no command has is an error.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from understudy.cli.command_errors import CommandError
from understudy.cli.values import LocalPath

F = TypeVar("F", bound=Callable[..., Any])


class SettingOption(click.Option):
    """An option that is also a key of the settings file. Its errors name the source of a bad value."""

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """Parse the value from its source."""
        try:
            return super().handle_parse_result(ctx, opts, args)
        except click.BadParameter as error:
            origin = self._origin(ctx)
            if origin is None:
                raise
            raise click.BadParameter(f"{error.message} It came from {origin}.", ctx, self) from error

    def _origin(self, ctx: click.Context) -> str | None:
        match ctx.get_parameter_source(str(self.name)):
            case ParameterSource.ENVIRONMENT:
                return str(self.envvar)
            case ParameterSource.DEFAULT_MAP:
                return "the settings file"
            case _:
                return None


def config_option(first_flag: str) -> Callable[[F], F]:
    """Give a command ``--config FILE``, whose keys become the defaults of its `SettingOption`s."""
    return click.option(
        "--config",
        type=LocalPath(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        envvar="UNDERSTUDY_CONFIG",
        is_eager=True,
        expose_value=False,
        callback=_apply,
        help=(
            f"TOML file with settings. The options from {first_flag} on are its keys, with underscores, and variables "
            "of the environment, UNDERSTUDY_<KEY>. A flag overrides the environment, which overrides the file."
        ),
    )


def _apply(ctx: click.Context, param: click.Parameter, file: Path | None) -> None:
    if file is None:
        return
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
        ctx.default_map = _defaults(ctx, document)
    except RecursionError as error:
        raise click.BadParameter(f"{file}: it is nested too deeply", ctx, param) from error
    except (OSError, ValueError, _FileError) as error:  # ValueError also of a number with thousands of digits
        raise click.BadParameter(f"{file}: {error}", ctx, param) from error


class _FileError(Exception):
    """The file holds a setting that no command accepts."""


def _defaults(ctx: click.Context, document: Mapping[str, Any]) -> dict[str, Any]:
    own = _settings(ctx.command)
    siblings = _siblings(ctx)
    name = str(ctx.command.name)
    sections = {key: value for key, value in document.items() if key in siblings and isinstance(value, dict)}
    section = sections.get(name, {})
    top = {key: value for key, value in document.items() if key not in sections}
    _refuse_unknown(section, own, f"[{name}]")
    if not top.keys() <= own.keys():
        known = {key for sibling in siblings for key in _settings(_loaded(ctx, sibling))}
        _refuse_unknown(top, known | own.keys(), "the top level")
    return {key: _given(own[key], value) for key, value in {**top, **section}.items() if key in own}


def _settings(command: click.Command | None) -> dict[str, click.Option]:
    parameters = command.params if command else []
    return {str(option.name): option for option in parameters if isinstance(option, SettingOption)}


def _siblings(ctx: click.Context) -> set[str]:
    """Return the names of all commands, including this one."""
    root = ctx.find_root()
    group = root.command
    return {str(ctx.command.name), *(group.list_commands(root) if isinstance(group, click.Group) else ())}


def _loaded(ctx: click.Context, name: str) -> click.Command | None:
    root = ctx.find_root()
    if not isinstance(root.command, click.Group):
        return ctx.command
    try:
        return root.command.get_command(root, name)
    except CommandError:  # its extra is not installed, so its keys are unknown here
        return None


def _refuse_unknown(given: Iterable[str], known: Iterable[str], place: str) -> None:
    known = sorted(known)
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
            raise _FileError(f"unknown key {key!r} at {place}; {hint}")


def _given(option: click.Option, value: Any) -> Any:
    """Return a value as on a command line, so that all sources are parsed alike."""
    if isinstance(value, dict) and option.multiple:
        return [f"{name}={_text(option, item)}" for name, item in value.items()]
    if isinstance(value, list) and option.multiple:
        return [_text(option, item) for item in value]
    text = _text(option, value)
    return [text] if option.multiple else text


def _text(option: click.Option, value: Any) -> str:
    if isinstance(value, dict | list):
        raise _FileError(f"{option.name} takes one value, not {'a table' if isinstance(value, dict) else 'an array'}")
    if isinstance(value, str) and "\0" in value:
        raise _FileError(f"{option.name} holds a zero byte, which no setting can have")
    return str(value).lower() if isinstance(value, bool) else str(value)
