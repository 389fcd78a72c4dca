"""Which line of a traceback is the user's own code."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_LIBRARIES: Final = frozenset(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
_PROJECT: Final = __name__.partition(".")[0]


def place_of(frames: Iterable[tuple[str, int | None]]) -> str:
    """Return the last line of the user's code that this project or a library called, as `` (FILE, line N)``.

    Empty if there is none: a script that calls this project is not what failed.

    Args:
        frames: The file and the line of each frame, the outermost first.
    """
    place = ""
    for file, line in frames:
        if _is_in(file, sys.modules[_PROJECT].__path__):
            place = ""
        elif not (file.startswith("<") or _is_in(file, _LIBRARIES)):
            place = f" ({file}, line {line})"
    return place


def _is_in(file: str, folders: Iterable[str]) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in folders)
