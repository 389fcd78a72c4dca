"""How values are written in the names of slices: each in its own way, and on one line."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

import numpy as np

NOT_A_NUMBER = "NaN"

_LIKE_ANOTHER_FEATURE = re.compile(r",.*[=<>]", re.DOTALL)
"""In a value, what could be read as the rest of the name of a slice, such as ``x,age=3``."""


def shown(value: Any) -> str:
    """Return a value of a feature, a number, a truth value or a text, as it is written in the name of a slice."""
    if isinstance(value, bytes):
        return _shown_text(value.decode(errors="surrogateescape"))
    if isinstance(value, str):
        return _shown_text(value)
    if not isinstance(value, float | np.floating):
        return str(value)
    return NOT_A_NUMBER if np.isnan(value) else np.format_float_positional(value, trim="-")


def _shown_text(text: str) -> str:
    """Return a text so that each one differs, on one line: if need be in quotation marks, as in JSON."""
    is_plain = all(map(_is_shown, text)) and text == text.strip() and not text.startswith('"')
    if is_plain and not _LIKE_ANOTHER_FEATURE.search(text):
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(each if _is_shown(each) else json.dumps(each)[1:-1] for each in quoted)


def _is_shown(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"
