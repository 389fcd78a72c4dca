"""JSON Web Tokens (RFC 7519): their verification, and the issuers' public keys (JWKS, RFC 7517)."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx
import structlog
from joserfc import jwt
from joserfc.errors import ExpiredTokenError, InvalidClaimError, JoseError
from joserfc.jwk import KeySet

from understudy.service.callers.callers_file import Issuer
from understudy.service.calls.caller import Caller, Group
from understudy.service.calls.status import UnauthenticatedError
from understudy.service.refreshed_files import open_regular
from understudy.service.tls import file_stamp

MAX_TOKEN_CHARACTERS: Final = 8192
MAX_JWKS_BYTES: Final = 1 << 20
MAX_SUBJECT_CHARACTERS: Final = 256

LEEWAY_SECONDS: Final = 30
"""How far the issuer's clock may be off."""
FETCH_SECONDS: Final = 300.0
"""How often keys at a URL are fetched."""
RETRY_SECONDS: Final = 10.0
"""How soon they are fetched again after a failure, or after a token named an unknown key."""
TIMEOUT_SECONDS: Final = 5.0
"""How long a fetch may take in all."""

_BEGINNINGS: Final = frozenset({"iat", "nbf"})
"""The claims that say from when on a token is valid."""

_log = structlog.get_logger(__name__)

_KEY_ERRORS: Final = (JoseError, ValueError, TypeError, KeyError, AttributeError)
"""What importing unusable keys raises."""


class IssuerKeys:
    """The public keys of one issuer. `refresh` belongs to one thread; everything else is thread-safe.

    Args:
        source: A file or a URL.
        clock: Seconds.
    """

    def __init__(self, source: Path | str, clock: Callable[[], float] = time.monotonic) -> None:
        self.source = source
        self._clock = clock
        self._stamp: object = None
        self._due = float("-inf")
        self._fetched = float("-inf")
        self._content = b""
        self.current: KeySet | None = None

    def refresh_soon(self) -> None:
        """Fetch the keys again soon, as a token names one that is unknown."""
        self._due = min(self._due, self._fetched + RETRY_SECONDS)

    def refresh(self) -> bool:
        """Read the keys again if they may have changed; return whether they did.

        Keys that cannot be used are logged, and change nothing.
        """
        if not self._may_have_changed():
            return False
        try:
            content = self._read()
            if content == self._content:
                return False
            keys = KeySet.import_key_set(json.loads(content))
            if any(key.key_type == "oct" for key in keys):
                raise ValueError("it holds a secret key; give public keys")
        except (OSError, httpx.HTTPError, httpx.InvalidURL, RecursionError, *_KEY_ERRORS) as error:
            self._due = self._clock() + RETRY_SECONDS
            kept = "kept the old keys" if self.current else "refuse its tokens"
            _log.error(
                "cannot use the keys of an issuer",
                source=str(self.source),
                reason=str(error) or type(error).__name__,
                consequence=kept,
            )
            return False
        self._content, self.current = content, keys
        return True

    def _may_have_changed(self) -> bool:
        if isinstance(self.source, Path):
            stamp = file_stamp(self.source)
            changed, self._stamp = stamp != self._stamp, stamp
            return changed
        now = self._clock()
        if now < self._due:
            return False
        self._fetched, self._due = now, now + FETCH_SECONDS
        return True

    def _read(self) -> bytes:
        if isinstance(self.source, str):
            return asyncio.run(asyncio.wait_for(_fetched(self.source), TIMEOUT_SECONDS))
        with open_regular(self.source) as file:
            return _bounded(file.read(MAX_JWKS_BYTES + 1))


async def _fetched(url: str) -> bytes:
    """Return what is at a URL. Redirects are not followed, as one could leave https.

    `wait_for` bounds all of it. The client's own timeouts are for each read, and an issuer could answer byte by byte.
    """
    trusted = ssl.create_default_context()
    async with httpx.AsyncClient(verify=trusted) as client, client.stream("GET", url) as response:
        response.raise_for_status()
        content = b""
        async for part in response.aiter_bytes():
            content = _bounded(content + part)
        return content


def _bounded(content: bytes) -> bytes:
    if len(content) > MAX_JWKS_BYTES:
        raise ValueError(f"it has more than {MAX_JWKS_BYTES} bytes")
    return content


def looks_like_web_token(token: str) -> bool:
    """Return whether a token has the three parts of a signed JSON Web Token."""
    return token.count(".") == 2  # noqa: PLR2004 - the parts of RFC 7515


def issuer_of(token: str) -> str:
    """Return the claim ``iss`` of a token that has not been verified yet.

    Raises:
        UnauthenticatedError: It has none.
    """
    if len(token) > MAX_TOKEN_CHARACTERS:
        raise UnauthenticatedError(f"the token has more than {MAX_TOKEN_CHARACTERS} characters")
    payload = token.split(".")[1]
    try:
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        issuer = claims["iss"]
    except (binascii.Error, ValueError, TypeError, KeyError, RecursionError):
        raise UnauthenticatedError("the token is no JSON Web Token with an issuer") from None
    if not isinstance(issuer, str):
        raise UnauthenticatedError("the token is no JSON Web Token with an issuer")
    return issuer


def verified_caller(token: str, issuer: Issuer, keys: IssuerKeys, now: float) -> tuple[Caller, float]:
    """Return the caller of a token, and when the token expires, in seconds since 1970.

    Raises:
        UnauthenticatedError: The token is not valid.
    """
    key_set = keys.current
    if key_set is None:
        raise UnauthenticatedError(f"the keys of the issuer {issuer.name!r} are not known yet; try again")
    requests = jwt.JWTClaimsRegistry(
        now=int(now),
        leeway=LEEWAY_SECONDS,
        iss={"essential": True, "value": issuer.issuer},
        aud={"essential": True, "value": issuer.audience},
        exp={"essential": True},
        sub={"essential": True},
    )
    try:
        decoded = jwt.decode(token, key_set, algorithms=issuer.algorithms)
        requests.validate(decoded.claims)
        return _caller(decoded.claims, issuer), float(decoded.claims["exp"]) + LEEWAY_SECONDS
    except ExpiredTokenError:
        raise UnauthenticatedError(f"the token has expired {_here(now)}; get a new one") from None
    except (*_KEY_ERRORS, OverflowError, RecursionError) as error:
        keys.refresh_soon()
        raise UnauthenticatedError(
            f"the token of the issuer {issuer.name!r} is not valid{_reason(error, now)}"
        ) from None


def _reason(error: Exception, now: float) -> str:
    if isinstance(error, InvalidClaimError) and error.claim in _BEGINNINGS:
        return f" yet {_here(now)}; compare the clocks"
    # Only the kind of joserfc's errors: a text could quote the token.
    return f": {error.error if isinstance(error, JoseError) else 'malformed'}"


def _here(now: float) -> str:
    return f"by this server's clock, at {datetime.fromtimestamp(now, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _caller(claims: dict[str, Any], issuer: Issuer) -> Caller:
    subject = claims["sub"]
    if not subject.isprintable() or len(subject) > MAX_SUBJECT_CHARACTERS:
        raise ValueError("the subject is not printable, or too long")
    values = claims.get(issuer.groups_claim, [])
    values = values.split() if isinstance(values, str) else values  # "scope" is one text
    if not isinstance(values, list):
        raise TypeError("the groups are no list")  # an object may have false for a group
    found: set[Group] = set()
    for value in values:
        if isinstance(value, str):
            found |= issuer.groups.get(value, frozenset())
    return Caller(name=f"{issuer.name}/{subject}", groups=frozenset(found), limits=issuer.limits)
