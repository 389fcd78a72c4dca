"""Checks the URLs and the secrets of webhooks."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from understudy.service.service_errors import SettingsError

SECRET_VARIABLE: Final = "UNDERSTUDY_WEBHOOK_SECRET"  # noqa: S105 - the name of a variable

_PREFIX: Final = "whsec_"
_LEAST_SECRET_BYTES: Final = 24
_MOST_SECRET_BYTES: Final = 64
_MOST_SECRETS: Final = 8
_SCHEMES: Final = ("http", "https")

Secrets = Callable[[], Sequence[str]]
"""Returns the secrets to sign with, read again for each attempt."""


def destination_name(url: str) -> str:
    """Return a name for a webhook that holds nothing secret: its host, and a digest that tells its URLs apart.

    Raises:
        SettingsError: It is no URL that can be posted to. The text does not hold it.
    """
    try:
        parts = urlsplit(url)
        port = "" if parts.port is None else f":{parts.port}"
        usable = parts.scheme in _SCHEMES and parts.hostname and url.isascii() and url.isprintable() and " " not in url
    except ValueError:
        usable = False
    if not usable:
        raise SettingsError("webhook is no URL such as https://example.com/events; give one with http or https")
    without_user = parts._replace(netloc=f"{parts.hostname}{port}").geturl()
    return f"{parts.hostname}{port}-{hashlib.sha256(without_user.encode()).hexdigest()[:8]}"


def secrets_from(file: Path | None) -> Secrets:
    """Return a function that reads the secrets of a file, one a line, or those of the environment.

    Raises:
        SettingsError: There are none, or one is not of the form ``whsec_`` and 24 to 64 bytes in Base64.
    """

    def read() -> Sequence[str]:
        if file is None:
            origin, text = SECRET_VARIABLE, os.environ.get(SECRET_VARIABLE, "")
        else:
            origin = f"webhook_secret_file {file}"
            try:
                text = file.read_text(encoding="ascii")
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(f"{origin} cannot be read: {error}") from error
        secrets = text.split()
        if not secrets and file is None:
            raise SettingsError(
                f"webhook needs a secret to sign with; give webhook_secret_file, or the variable {SECRET_VARIABLE}"
            )
        if not 1 <= len(secrets) <= _MOST_SECRETS:
            raise SettingsError(f"{origin} holds {len(secrets)} secrets; give 1 to {_MOST_SECRETS}, one a line")
        for number, secret in enumerate(secrets, 1):
            if not _is_secret(secret):
                raise SettingsError(
                    f"secret {number} of {origin} is not of the form {_PREFIX} and {_LEAST_SECRET_BYTES} to "
                    f"{_MOST_SECRET_BYTES} bytes in Base64; make one with "
                    '`echo "whsec_$(openssl rand -base64 32)"`'
                )
        return secrets

    read()
    return read


def _is_secret(text: str) -> bool:
    try:
        content = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return False
    return text.startswith(_PREFIX) and _LEAST_SECRET_BYTES <= len(content) <= _MOST_SECRET_BYTES
