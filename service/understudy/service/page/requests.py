"""The parameters of a request for the page."""

from __future__ import annotations

from typing import Final

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.page.page_call import PageCall

_LARGEST: Final = 2**63 - 1


def asked(call: PageCall, name: str) -> int | None:
    """Return a parameter of the query that is a number; None if it is missing.

    Raises:
        InvalidInputError: It is no number from 0 up.
    """
    value = call.request.query_params.get(name)
    return None if value is None else number(f"the parameter {name}", value)


def number(what: str, text: str) -> int:
    """Return the number from 0 up in a text; raise InvalidInputError if it is none."""
    if not (text.isascii() and text.isdigit() and len(text) < len(str(_LARGEST))):
        raise InvalidInputError(f"{what} is {text!r}; give a number from 0 up")
    return int(text)
