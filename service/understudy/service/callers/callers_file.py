"""The file of callers: TOML, checked to the last key before any of it is used. Of tokens it holds the hashes.

[limits]                                   # of every caller without its own
max_requests = 64

[[callers]]
name = "trainer"
groups = ["evaluate", "promote"]
tokens = ["sha256:..."]                    # of `understudy token trainer`
certificates = ["trainer.example.com"]     # common or alternative names
limits = { max_requests_per_second = 10 }

[[issuers]]
name = "corp"
issuer = "https://login.example.com"
audience = "understudy"
jwks = "https://login.example.com/keys"    # or a file beside this one
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

from understudy.service.addresses import is_loopback
from understudy.service.calls.caller import Caller, Group, Limits
from understudy.service.refreshed_files import open_regular
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


ALGORITHMS: Final = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "EdDSA",
    "Ed25519",
)
"""The accepted algorithms of signatures: those with a public key."""
DEFAULT_ALGORITHMS: Final = ("RS256", "PS256", "ES256", "EdDSA", "Ed25519")

_CALLER_KEYS: Final = frozenset({"name", "groups", "tokens", "certificates", "limits"})
_ISSUER_KEYS: Final = frozenset(
    {"name", "issuer", "audience", "algorithms", "jwks", "groups_claim", "groups", "limits"}
)


@dataclass(frozen=True, kw_only=True)
class Issuer:
    """An issuer of JSON Web Tokens.

    Attributes:
        name: Its name; callers are named after it: ``NAME/SUBJECT``.
        issuer: The claim ``iss`` of its tokens.
        audience: What their claim ``aud`` must contain.
        algorithms: The accepted algorithms of signatures.
        jwks: Its public keys, a file or a URL.
        groups_claim: The claim that lists a caller's groups.
        groups: For each value of that claim the groups it stands for.
        limits: The limits of each of its callers.
    """

    name: str
    issuer: str
    audience: str
    algorithms: tuple[str, ...]
    jwks: Path | str
    groups_claim: str
    groups: Mapping[str, frozenset[Group]]
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class CallersFile:
    """What the file said at one time.

    Attributes:
        tokens: The callers by the SHA-256 of their tokens.
        certificates: The callers by the names in their certificates.
        issuers: The issuers by the claim ``iss``.
    """

    tokens: Mapping[bytes, Caller]
    certificates: Mapping[str, Caller]
    issuers: Mapping[str, Issuer]

    @classmethod
    def read(cls, file: Path) -> CallersFile:
        """Read and check a file.

        Raises:
            SettingsError: It cannot be read, or something in it is not as it should be.
        """
        try:
            with open_regular(file) as opened:
                content = opened.read()
            return _parsed(tomllib.loads(content.decode("utf-8")), file.parent)
        except OSError as error:
            raise SettingsError(
                f"--callers {file} cannot be read ({error.strerror}); give a TOML file that this user can read"
            ) from error
        except SettingsError as error:
            raise SettingsError(f"--callers {file}: {error}") from error
        except RecursionError as error:
            raise SettingsError(f"--callers {file} is not TOML: it is nested too deeply") from error
        except ValueError as error:  # also of a number with thousands of digits
            raise SettingsError(f"--callers {file} is not TOML: {error}") from error


def _parsed(content: Mapping[str, Any], folder: Path) -> CallersFile:
    _check_keys("the file", content, {"limits", "callers", "issuers"})
    defaults = _limits("limits", content.get("limits", {}), Limits())
    tokens: dict[bytes, Caller] = {}
    certificates: dict[str, Caller] = {}
    names: set[str] = set()
    for entry in _tables(content, "callers"):
        caller = _caller(entry, defaults)
        _check_unique(names, caller.name, "name")
        names.add(caller.name)
        for text in _texts(caller.name, entry, "tokens"):
            _check_unique(tokens, digest := parse_hash(text), f"token of {caller.name!r}")
            tokens[digest] = caller
        for name in _texts(caller.name, entry, "certificates"):
            _check_unique(certificates, name, "certificate")
            certificates[name] = caller
    issuers: dict[str, Issuer] = {}
    for entry in _tables(content, "issuers"):
        issuer = _issuer(entry, defaults, folder)
        _check_unique(names, issuer.name, "name")
        names.add(issuer.name)
        _check_unique(issuers, issuer.issuer, "issuer")
        issuers[issuer.issuer] = issuer
    return CallersFile(
        tokens=MappingProxyType(tokens),
        certificates=MappingProxyType(certificates),
        issuers=MappingProxyType(issuers),
    )


def _caller(entry: Mapping[str, Any], defaults: Limits) -> Caller:
    name = _text("a caller", entry, "name")
    _check_keys(name, entry, _CALLER_KEYS)
    if not (entry.get("tokens") or entry.get("certificates")):
        raise SettingsError(f"{name!r} has neither tokens nor certificates; give one of them")
    return Caller(
        name=name,
        groups=_groups(name, _texts(name, entry, "groups")),
        limits=_limits(name, entry.get("limits", {}), defaults),
    )


def _issuer(entry: Mapping[str, Any], defaults: Limits, folder: Path) -> Issuer:
    name = _text("an issuer", entry, "name")
    _check_keys(name, entry, _ISSUER_KEYS)
    algorithms = _texts(name, entry, "algorithms") if "algorithms" in entry else DEFAULT_ALGORITHMS
    for algorithm in algorithms:
        if algorithm not in ALGORITHMS:
            raise SettingsError(f"{name!r} has the algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    mapping = entry.get("groups", {group.value: [group.value] for group in Group})
    if not isinstance(mapping, dict):
        raise SettingsError(f"groups of {name!r} is no table; give the groups of each value of the claim")
    return Issuer(
        name=name,
        issuer=_text(name, entry, "issuer"),
        audience=_text(name, entry, "audience"),
        algorithms=tuple(algorithms),
        jwks=_jwks(name, _text(name, entry, "jwks"), folder),
        groups_claim=_text(name, entry, "groups_claim") if "groups_claim" in entry else "groups",
        groups={value: _groups(name, _texts(f"groups of {name}", mapping, value)) for value in mapping},
        limits=_limits(name, entry.get("limits", {}), defaults),
    )


def _jwks(name: str, text: str, folder: Path) -> Path | str:
    if "://" not in text:
        return folder / text
    with suppress(ValueError):  # half an IPv6 address
        url = urlsplit(text)
        if url.scheme == "https" or (url.scheme == "http" and is_loopback(url.hostname or "")):
            return text
    raise SettingsError(
        f"jwks of {name!r} is {text}; give a file, or an https URL, as changed keys would let an attacker be any caller"
    )


def _limits(name: str, table: Any, defaults: Limits) -> Limits:
    if not isinstance(table, dict):
        raise SettingsError(f"limits of {name!r} is no table")
    fields = {field.name for field in dataclasses.fields(Limits)}
    _check_keys(f"limits of {name}", table, fields)
    for key, value in table.items():
        whole = key not in {"max_mib", "max_requests_per_second"}
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < float("inf"):
            raise SettingsError(f"{key} of {name!r} is {value!r}; give a {'whole ' if whole else ''}number above 0")
    return dataclasses.replace(defaults, **table)


def _groups(name: str, texts: Sequence[str]) -> frozenset[Group]:
    known = set(Group)
    for text in texts:
        if text not in known:
            raise SettingsError(f"{name!r} has the group {text!r}; there are {', '.join(Group)}")
    return frozenset(map(Group, texts))


def _tables(content: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
    tables = content.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SettingsError(f"{key} is no list of tables; begin each with [[{key}]]")
    yield from tables


def _text(name: str, table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise SettingsError(f"{name!r} has {'no' if value is None else 'an unusable'} {key}; give a text")
    return value


def _texts(name: str, table: Mapping[str, Any], key: str) -> list[str]:
    values = table.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise SettingsError(f"{key} of {name!r} is no list of texts")
    return values


def _check_keys(name: str, table: Mapping[str, Any], known: Collection[str]) -> None:
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise SettingsError(f"{name!r} has the unknown key {unknown[0]!r}; there are {', '.join(sorted(known))}")


def _check_unique(seen: Collection[Any], value: Any, what: str) -> None:
    if value in seen:
        shown = "" if isinstance(value, bytes) else f" {value!r}"
        raise SettingsError(f"the {what}{shown} is there twice; each belongs to one caller")
