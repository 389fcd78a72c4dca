"""A request for the page, whose token may come from a browser's dialog."""

from __future__ import annotations

import base64
import binascii
from typing import Final

from understudy.service.calls.status import Failure
from understudy.service.rest.rest_call import RestCall

_AUTHORIZATION: Final = "authorization"
_BASIC: Final = "basic"


class PageCall(RestCall):
    """A request for the page.

    Browsers cannot send bearer tokens, so the password of HTTP Basic (RFC 7617) is taken for one; any user name will
    do. From there on the token is checked like every other.
    """

    __slots__ = ()

    def header(self, name: str) -> str | None:
        """See `Call`."""
        value = super().header(name)
        return value if value is None or name != _AUTHORIZATION else _as_bearer(value)

    @property
    def failure(self) -> Failure:
        """Why the call failed."""
        return self._failure


def _as_bearer(value: str) -> str:
    """Return Basic credentials as a bearer token; other and malformed ones stay as they are, and are refused."""
    scheme, _, credentials = value.partition(" ")
    if scheme.lower() != _BASIC:
        return value
    try:
        _, colon, token = base64.b64decode(credentials.strip(), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return value
    return f"Bearer {token}" if colon else value
