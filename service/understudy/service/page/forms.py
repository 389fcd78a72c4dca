"""What requests for the page ask for, and forms that act: where they must come from, and who asked for them."""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Final
from urllib.parse import parse_qsl

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.calls.status import PermissionDeniedError
from understudy.service.page.page_call import PageCall

MAX_FORM_BYTES: Final = 16_384
VALID_SECONDS: Final = 3600.0
"""How long a form can be sent after it was shown."""
TOKEN: Final = "token"  # noqa: S105 - the name of the field

_FORM: Final = "application/x-www-form-urlencoded"
_MAX_FIELDS: Final = 16


class FormTokens:
    """Issues and checks the tokens of forms, which are valid for one process. Thread-safe.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(32)

    def issue(self, caller: str, act: str, fields: Mapping[str, str]) -> str:
        """Return the token of a form for one caller, one act, and these hidden fields."""
        return self._signed(int(self._clock() + VALID_SECONDS), caller, act, fields)

    def check(self, token: str, caller: str, act: str, fields: Mapping[str, str]) -> None:
        """Check a token.

        Raises:
            PermissionDeniedError: It is not the token of this form, or too old.
        """
        text = token.partition(".")[0]
        expires = int(text) if text.isascii() and text.isdigit() and len(text) < len(str(2**63)) else 0
        expected = self._signed(expires, caller, act, fields)
        if not hmac.compare_digest(token.encode(errors="replace"), expected.encode()) or expires < self._clock():
            raise PermissionDeniedError(
                "the form is not one that this server showed to you within the last hour and since its start; go back "
                "to the page and confirm again"
            )

    def _signed(self, expires: int, caller: str, act: str, fields: Mapping[str, str]) -> str:
        content = json.dumps([expires, caller, act, sorted(fields.items())]).encode()
        return f"{expires}.{hmac.new(self._secret, content, sha256).hexdigest()}"


def fields_of(content_type: str, body: bytes) -> dict[str, str]:
    """Return the fields of a form.

    Raises:
        InvalidInputError: The body is no form, or a field occurs twice.
    """
    if content_type.partition(";")[0].strip().lower() != _FORM:
        raise InvalidInputError(f"the content type is {content_type!r}; a form ({_FORM}) was expected")
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=True, max_num_fields=_MAX_FIELDS)
    except ValueError as error:
        raise InvalidInputError(f"the form cannot be read: {error}") from error
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise InvalidInputError("a field of the form occurs twice")
    return fields


def check_same_origin(call: PageCall) -> None:
    """Check that a form was sent from this server's own page.

    Browsers say where a request comes from in ``Sec-Fetch-Site``, or over plain HTTP in ``Origin`` alone.

    Raises:
        PermissionDeniedError: It was sent from elsewhere, or does not say from where.
    """
    site, origin = call.header("sec-fetch-site"), call.header("origin")
    if site is not None:
        is_own = site == "same-origin"
    else:
        host = call.header("host")
        is_own = bool(origin and host) and (origin or "").partition("://")[2] == host
    if not is_own:
        raise PermissionDeniedError(
            "the form was not sent from a page of this server; open the page and act there, or use the command line"
        )


_LARGEST: Final = 2**63 - 1


def requested(call: PageCall, name: str) -> int | None:
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
