"""The names Keras makes up for layers, which depend on what else the process has built."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any


def without_made_up_names(config: Any) -> Any:
    """Return a serialized Keras object in which made-up names are counted anew from the beginning.

    ``dense_7`` becomes what the first made-up name of a Dense layer always becomes, wherever it is referred to. So
    models that differ only in when they were built are equal, as when a script builds its model again.
    """
    renamed: dict[str, str] = {}
    counters: dict[str, Iterator[int]] = {}
    for stem, name in _made_up_names(config):
        if name not in renamed:
            renamed[name] = f"{stem}#{next(counters.setdefault(stem, itertools.count()))}"
    return _rename(config, renamed)


def _made_up_names(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the stem and the name of every object that goes by its class, in the order of the configuration."""
    if isinstance(value, dict):
        inner = value.get("config")
        name = inner.get("name") if isinstance(inner, dict) else None
        stem = _snake_case(str(value.get("class_name")))
        if isinstance(name, str) and re.fullmatch(rf"{re.escape(stem)}(_\d+)?", name):
            yield stem, name
        for item in value.values():
            yield from _made_up_names(item)
    elif isinstance(value, list):
        for item in value:
            yield from _made_up_names(item)


def _rename(value: Any, renamed: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _rename(item, renamed) for key, item in value.items()}
    if isinstance(value, list):
        return [_rename(item, renamed) for item in value]
    return renamed.get(value, value) if isinstance(value, str) else value


def _snake_case(class_name: str) -> str:
    """Return the stem Keras makes of a class's name: ``GRUCell`` gives ``gru_cell``."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", class_name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()
