"""Which lines of a traceback are the user's own code."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Final

_LIBRARIES: Final = frozenset(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
_PROJECT: Final = Path(__file__).parent.parent.name


def is_users(file: str) -> bool:
    """Whether a file of a traceback is neither Python's, an installed library's, nor of this project."""
    path = Path(file)
    return not (
        file.startswith("<") or _PROJECT in path.parts or any(path.is_relative_to(folder) for folder in _LIBRARIES)
    )
