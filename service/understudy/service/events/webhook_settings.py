"""Checks the URLs and the secrets of webhooks."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from understudy.service.addresses import is_http_url
from understudy.service.refreshed_files import open_regular
from understudy.service.service_errors import SettingsError

SECRET_VARIABLE: Final = "UNDERSTUDY_WEBHOOK_SECRET"  # noqa: S105 - the name of a variable

_PREFIX: Final = "whsec_"
_LEAST_SECRET_BYTES: Final = 24
_MOST_SECRET_BYTES: Final = 64
_MOST_SECRETS: Final = 8
_SHARED: Final = ""

Secrets = Callable[[], Sequence[str]]
"""Returns the secrets to sign with, read again for each attempt."""


def destination_name(url: str) -> str:
    """Return a name for a webhook that holds nothing secret: its host, and a digest that tells its URLs apart.

    Raises:
        SettingsError: It is no URL that can be posted to. The text does not hold it.
    """
    if not is_http_url(url):
        raise SettingsError("webhook is no URL such as https://example.com/events; give one with http or https")
    parts = urlsplit(url)
    port = "" if parts.port is None else f":{parts.port}"
    without_user = parts._replace(netloc=f"{parts.hostname}{port}").geturl()
    return f"{parts.hostname}{port}-{hashlib.sha256(without_user.encode()).hexdigest()[:8]}"


def secrets_from(file: Path | None, names: Sequence[str]) -> dict[str, Secrets]:
    """Return for each webhook a function that reads its secrets from a file, or from the environment.

    There white space separates the secrets. One for a single webhook has its name, as `destination_name` makes it, or
    its host before it: ``HOST=whsec_...``. A webhook without secrets of its own has those without a name.

    Args:
        file: The file; None for the variable `SECRET_VARIABLE`.
        names: The names of the webhooks.

    Raises:
        SettingsError: A webhook has none or too many, one names another webhook, or one is not of the form ``whsec_``
            and 24 to 64 bytes in Base64. The text holds none.
    """

    def read(name: str) -> Sequence[str]:
        origin = SECRET_VARIABLE if file is None else f"webhook_secret_file {file}"
        by_webhook = _secrets_by_webhook(origin, _text_of(origin, file), names)
        secrets = by_webhook[name] or by_webhook[_SHARED]
        if not secrets:
            raise SettingsError(
                f"webhook {name} needs a secret to sign with, and {origin} has none for it; give webhook_secret_file, "
                f"or the variable {SECRET_VARIABLE}, with whsec_... or {name}=whsec_..."
            )
        if len(secrets) > _MOST_SECRETS:
            raise SettingsError(
                f"{origin} holds {len(secrets)} secrets for webhook {name}; give {_MOST_SECRETS} at most"
            )
        return secrets

    for name in names:
        read(name)
    return {name: partial(read, name) for name in names}


def _text_of(origin: str, file: Path | None) -> str:
    if file is None:
        return os.environ.get(SECRET_VARIABLE, "")
    try:
        with open_regular(file) as opened:
            return opened.read().decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{origin} cannot be read: {error}") from error


def _secrets_by_webhook(origin: str, text: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the secrets of each webhook, and under an empty name those for all others."""
    found: dict[str, list[str]] = {name: [] for name in (_SHARED, *names)}
    for number, item in enumerate(text.split(), 1):
        label, _, rest = item.rpartition(f"={_PREFIX}")
        secret = f"{_PREFIX}{rest}" if label else item
        if not _is_secret(secret):
            raise SettingsError(
                f"secret {number} of {origin} is not of the form {_PREFIX} and {_LEAST_SECRET_BYTES} to "
                f"{_MOST_SECRET_BYTES} bytes in Base64; make one with "
                '`echo "whsec_$(openssl rand -base64 32)"`'
            )
        of = [name for name in names if label in (name, name.rpartition("-")[0])] if label else [_SHARED]
        if not of:
            raise SettingsError(
                f"secret {number} of {origin} is for a webhook that is not given; before the = name one of "
                f"{', '.join(names)}, or its host"
            )
        for name in of:
            found[name].append(secret)
    return found


def _is_secret(text: str) -> bool:
    try:
        content = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return False
    return text.startswith(_PREFIX) and _LEAST_SECRET_BYTES <= len(content) <= _MOST_SECRET_BYTES
