"""Bearer tokens: where they come from, and over which connections they may go."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from understudy.clients.channel import is_on_this_machine

AUTHORIZATION: Final = "authorization"

_TOKEN: Final = re.compile(r"[\x21-\x7e]+")

_Stamp = tuple[int, ...]


class TokenError(ValueError):
    """A token cannot be used, or not over this connection."""


class BearerToken:
    """The token that a client sends with its calls. Thread-safe.

    Args:
        token: The token itself, or None.
        file: The file that holds it, or None. It is read again when it changes. While it is missing or holds no token,
            the last token is used.

    Raises:
        TokenError: There is no token or more than one, or the file cannot be read.
    """

    def __init__(self, token: str | None, file: str | os.PathLike[str] | None) -> None:
        if (token is None) == (file is None):
            raise TokenError("got token and token_file; give one of them")
        self._file = None if file is None else Path(file)
        try:
            self._read = ((), _header(token or "", "token")) if self._file is None else _read(self._file)
        except (OSError, UnicodeDecodeError) as error:
            raise TokenError(f"token_file {self._file} cannot be read: {error}") from error

    @property
    def header(self) -> str:
        """The value of the metadata ``authorization``."""
        if self._file is not None:
            with suppress(OSError, UnicodeDecodeError, TokenError):  # it is being replaced
                if _stamp(self._file) != self._read[0]:
                    self._read = _read(self._file)
        return self._read[1]


def check_plaintext(targets: str | Sequence[str], *, leaves_machine: bool) -> None:
    """Check that a client without TLS may send a token.

    Args:
        targets: What the client calls.
        leaves_machine: Whether the token may be sent to other machines.

    Raises:
        TokenError: It may not, and a target is not on this machine.
    """
    for target in [targets] if isinstance(targets, str) else targets:
        if not (leaves_machine or is_on_this_machine(target)):
            raise TokenError(
                f"the token would be sent to {target} without TLS; give credentials= (--tls-ca), or "
                "token_without_tls=True (--token-without-tls) where the network between is trusted"
            )


def _read(file: Path) -> tuple[_Stamp, str]:
    """Return the stamp of a file from before it is read, so that a later change is not missed, and the header."""
    stamp = _stamp(file)
    return stamp, _header(file.read_text(encoding="ascii").strip(), f"token_file {file}")


def _header(token: str, source: str) -> str:
    if not _TOKEN.fullmatch(token):
        raise TokenError(f"{source} holds no token; expected printable ASCII characters without spaces")
    return f"Bearer {token}"


def _stamp(file: Path) -> _Stamp:
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
