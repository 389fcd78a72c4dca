"""Bearer tokens: random values, of which only the hash is kept."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Final

from understudy.service.service_errors import SettingsError

_PREFIX: Final = "understudy_"
"""Lets scanners of repositories recognize a token."""
_RANDOM_BYTES: Final = 32
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")


def new_token() -> str:
    """Return a token with 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def digest_of(token: str) -> bytes:
    """Return the SHA-256 of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def hash_text(token: str) -> str:
    """Return the hash of a token as the file of callers holds it."""
    return f"sha256:{digest_of(token).hex()}"


def parse_hash(text: str) -> bytes:
    """Return the digest in a hash.

    Raises:
        SettingsError: It is malformed.
    """
    match = _HASH.fullmatch(text)
    if match is None:
        raise SettingsError(
            "a token is not 'sha256:' and 64 hexadecimal digits in lower case; `understudy token NAME` makes a token "
            "and its hash"
        )
    return bytes.fromhex(match[1])
