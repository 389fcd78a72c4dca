"""The known callers, by token and by certificate; the file and the issuers' keys are read again when they change."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from understudy.service.callers.callers_file import CallersFile, digest_of
from understudy.service.callers.web_tokens import IssuerKeys, issuer_of, looks_like_web_token, verified_caller
from understudy.service.calls.caller import Caller
from understudy.service.calls.status import UnauthenticatedError
from understudy.service.service_errors import SettingsError
from understudy.service.tls import file_stamp

MAX_VERIFIED: Final = 4096
"""How many verified JSON Web Tokens are remembered until they expire."""

_SCHEME: Final = "bearer"

_log = structlog.get_logger(__name__)


class _Known:
    """The callers at one time. Belongs to the event loop's thread, but may be created on any."""

    def __init__(self, content: CallersFile, keys: Mapping[Path | str, IssuerKeys]) -> None:
        self.content = content
        self.keys = keys
        self._verified: OrderedDict[bytes, tuple[Caller, float]] = OrderedDict()

    def by_token(self, token: str, now: float) -> Caller:
        digest = digest_of(token)
        caller = self.content.tokens.get(digest)  # its timing tells about the hash at most, and not about the token
        if caller is not None:
            return caller
        return self._by_web_token(token, digest, now)

    def _by_web_token(self, token: str, digest: bytes, now: float) -> Caller:
        verified = self._verified.get(digest)
        if verified is not None and now < verified[1]:
            return verified[0]
        if not (self.content.issuers and looks_like_web_token(token)):
            raise UnauthenticatedError("the token is not known here; it may have been replaced")
        issuer = self.content.issuers.get(issuer_of(token))
        if issuer is None:
            raise UnauthenticatedError("the token is of an issuer that is not known here")
        self._verified[digest] = caller, _ = verified_caller(token, issuer, self.keys[issuer.jwks], now)
        self._verified.move_to_end(digest)
        if len(self._verified) > MAX_VERIFIED:
            self._verified.popitem(last=False)
        return caller


class CallerDirectory:
    """Finds the caller of a call. `refresh` is for one thread at a time; `identify` belongs to the event loop's thread.

    Args:
        file: The file of callers.
        clock: Seconds since 1970, which tokens expire by.

    Raises:
        SettingsError: The file cannot be used.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._clock = clock
        self._stamp = file_stamp(file)
        self._is_current = True
        self._known = _Known(content := CallersFile.read(file), _keys_of(content, {}))
        self._refresh_keys(self._known)

    @property
    def is_current(self) -> bool:
        """Whether the callers are those of the file; if not, what it holds cannot be used."""
        return self._is_current

    def identify(self, authorization: str | bytes | None, certificate_names: Callable[[], Sequence[str]]) -> Caller:
        """Return the caller with this token, or else with a certificate that has one of these names.

        Args:
            authorization: The header of this name, if present.
            certificate_names: Returns the names in the caller's certificate, most specific first.

        Raises:
            UnauthenticatedError: There is none.
        """
        known = self._known
        if authorization is not None:
            return known.by_token(_token_of(authorization), self._clock())
        names = certificate_names()
        for name in names:
            caller = known.content.certificates.get(name)
            if caller is not None:
                return caller
        if names:
            raise UnauthenticatedError(
                f"the certificate of {' or '.join(map(repr, names))} belongs to no known caller; send a token in the "
                "header authorization: Bearer TOKEN"
            )
        raise UnauthenticatedError(
            "the call has neither a token nor a client certificate; send authorization: Bearer TOKEN"
        )

    def refresh(self) -> None:
        """Read the file and the issuers' keys again if they changed.

        A file that cannot be used is logged once, and changes nothing.
        """
        content = self._newest_content()
        known = self._known if content is self._known.content else _Known(content, _keys_of(content, self._known.keys))
        if self._refresh_keys(known) or known is not self._known:
            self._known = _Known(content, known.keys)  # forgets what the old keys verified

    def _newest_content(self) -> CallersFile:
        stamp = file_stamp(self._file)
        if stamp == self._stamp:
            return self._known.content
        try:
            content = CallersFile.read(self._file)
        except SettingsError as error:
            self._stamp, self._is_current = stamp, False
            _log.error("kept the old callers, because the new file cannot be used", reason=str(error))
            return self._known.content
        if file_stamp(self._file) != stamp:  # written meanwhile; the next call reads it
            return self._known.content
        self._stamp, self._is_current = stamp, True
        _log.info("the callers have changed", file=str(self._file))
        return content

    def _refresh_keys(self, known: _Known) -> bool:
        changed = [keys.refresh() for keys in known.keys.values()]
        return any(changed)


def _keys_of(content: CallersFile, old: Mapping[Path | str, IssuerKeys]) -> Mapping[Path | str, IssuerKeys]:
    return {issuer.jwks: old.get(issuer.jwks) or IssuerKeys(issuer.jwks) for issuer in content.issuers.values()}


def _token_of(authorization: str | bytes) -> str:
    text = authorization.decode("latin-1") if isinstance(authorization, bytes) else authorization
    scheme, _, token = text.partition(" ")
    if scheme.lower() != _SCHEME or not token:
        raise UnauthenticatedError("the header authorization is not 'Bearer TOKEN'")
    return token.strip()
