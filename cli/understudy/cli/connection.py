"""Connection settings of the client commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click

from understudy.cli.command_errors import CommandError, reported

if TYPE_CHECKING:
    from understudy.clients import Client, ModelMetadata, Version

_LABELS: Final = ("serving", "latest", "best")
_MIB: Final = 1024 * 1024
_LARGEST_MESSAGE_MIB: Final = 2047
_PROXIES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
"""The variables that gRPC takes a proxy from, the first that is set."""


@dataclass(frozen=True, kw_only=True)
class ConnectionSettings:
    """The settings of the client commands.

    Raises:
        ValueError: A value is out of range.
    """

    target: tuple[str, ...] = field(
        default=("127.0.0.1:8500",),
        metadata={"help": "The server, or several separated by commas, used in turn.", "metavar": "HOST:PORT,..."},
    )
    model_name: str = field(
        default="", metadata={"help": "The model's name on the server; its only model by default.", "metavar": "NAME"}
    )
    timeout_seconds: float | None = field(
        default=None,
        metadata={
            "help": "How long a call may take; by default 30 for a single response and 3600 for a stream.",
            "metavar": "SECONDS",
        },
    )
    max_message_mib: int = field(
        default=256, metadata={"help": "The largest message to send or receive, in MiB.", "metavar": "MIB"}
    )
    tls_ca: Path | None = field(
        default=None,
        metadata={
            "help": "Call over TLS; the authorities that sign the server's certificate, in PEM.",
            "metavar": "FILE",
        },
    )
    tls_cert: Path | None = field(
        default=None,
        metadata={"help": "With --tls-ca, the certificate to show to the server, in PEM.", "metavar": "FILE"},
    )
    tls_key: Path | None = field(
        default=None,
        metadata={"help": "The private key of --tls-cert, unencrypted, in PEM.", "metavar": "FILE"},
    )
    tls_server_name: str | None = field(
        default=None,
        metadata={
            "help": "With --tls-ca, the name in the server's certificate; needed if --target has another name, or "
            "several.",
            "metavar": "NAME",
        },
    )
    token_file: Path | None = field(
        default=None,
        metadata={
            "help": "The file that holds the bearer token to send with each call; read again when it changes.",
            "metavar": "FILE",
        },
    )
    token_without_tls: bool = field(
        default=False,
        metadata={
            "help": "Send the token also without --tls-ca to other machines; where a proxy or a service mesh has TLS."
        },
    )

    def __post_init__(self) -> None:
        if not self.target:
            raise ValueError("target names no server; give HOST:PORT")
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds must be more than 0, not {self.timeout_seconds}")
        if not 1 <= self.max_message_mib <= _LARGEST_MESSAGE_MIB:
            raise ValueError(
                f"max_message_mib must be between 1 and {_LARGEST_MESSAGE_MIB}, not {self.max_message_mib}"
            )


@contextmanager
def connected(settings: ConnectionSettings) -> Iterator[Client]:
    """Yield a client, and report its errors to the user."""
    from understudy.clients import Client, DeadlineExceededError, UnavailableError, UnderstudyError
    from understudy.clients.token import TokenError

    limits: dict[str, Any] = {"max_message_bytes": settings.max_message_mib * _MIB}
    if settings.timeout_seconds is not None:
        limits |= {"timeout_seconds": settings.timeout_seconds, "stream_timeout_seconds": settings.timeout_seconds}
    tls = tls_arguments(settings)
    try:
        client = Client(
            settings.target,
            model_name=settings.model_name,
            token_file=settings.token_file,
            token_without_tls=settings.token_without_tls,
            **limits,
            **tls,
        )
    except TokenError as error:
        raise click.BadParameter(str(error), param_hint="'--token-file'") from error
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--target'") from error
    with client, reported(UnderstudyError):
        asked = f"asked {', '.join(settings.target)}"
        try:
            yield client
        except UnavailableError as error:
            hints = [
                "--target says whom to ask",
                *([] if tls else ["--tls-ca that it has TLS"]),
                *_proxy_hints(settings),
            ]
            raise CommandError(f"{error} ({asked}; {', and '.join(hints)})") from error
        except DeadlineExceededError as error:
            raise CommandError(f"{error} ({asked}; --timeout-seconds says how long to wait)") from error


def _proxy_hints(settings: ConnectionSettings) -> list[str]:
    """Return how to do without the proxy that gRPC takes from the environment, if it takes one."""
    from understudy.clients.channel import is_on_this_machine

    named = next((name for name in _PROXIES if os.environ.get(name)), None)
    if named is None or all(map(is_on_this_machine, settings.target)):
        return []
    return [f"no_proxy which hosts to call without the proxy of {named}"]


def metadata_of(client: Client, *versions: Version | None) -> ModelMetadata:
    """Return the metadata of the first of these versions that is loaded, else of the newest or the serving one.

    Versions that are not loaded yet most likely take the same arrays. A gate may hold back all that are loaded.
    """
    from understudy.clients import NotFoundError

    for version in (*versions, "latest"):
        with suppress(NotFoundError):
            return client.metadata(version=version)
    return client.metadata()


def tls_arguments(settings: ConnectionSettings) -> dict[str, Any]:
    """Return the arguments of a client for TLS; none without ``tls_ca``.

    Raises:
        click.UsageError: A file cannot be used, or is missing.
    """
    from understudy.clients.tls_files import TlsFileError, read_credentials

    ca, certificate, key, name = settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_server_name
    if ca is None:
        if certificate or key or name:
            raise click.UsageError(
                "--tls-cert, --tls-key and --tls-server-name go with --tls-ca; give the authorities to trust, such as "
                "/etc/ssl/certs/ca-certificates.crt for the public ones"
            )
        return {}
    if (certificate is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key go together; give both, or neither")
    try:
        credentials = read_credentials(ca, certificate, key)
    except TlsFileError as error:
        raise click.BadParameter(str(error), param_hint=f"'--tls-{error.role}'") from error
    options = [("grpc.ssl_target_name_override", name)] if name else []
    return {"credentials": credentials, "options": options}


class VersionType(click.ParamType["Version"]):
    """A training step, or a label."""

    name = "version"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the help text for the value."""
        del param, ctx
        return f"STEP|{'|'.join(_LABELS)}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Version:
        """Read a step or a label."""
        text = str(value)
        if text in _LABELS:
            return cast("Version", text)
        if text.isdecimal():
            return int(text)
        return self.fail(f"{text!r} is neither a step nor one of {', '.join(_LABELS)}.", param, ctx)


class VersionsType(click.ParamType["tuple[Version, ...]"]):
    """Two or more versions, separated by commas.

    Args:
        most: How many there may be; any number if None.
    """

    name = "versions"

    def __init__(self, most: int | None = None) -> None:
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Version, ...]:
        """Read the versions."""
        versions = tuple(VersionType().convert(text.strip(), param, ctx) for text in str(value).split(","))
        if len(versions) < 2:  # noqa: PLR2004 - a comparison takes two
            self.fail(f"{value!r} is one version; give two or more, separated by commas.", param, ctx)
        if self._most is not None and len(versions) > self._most:
            self.fail(f"{value!r} are {len(versions)} versions; give {self._most} at most.", param, ctx)
        return versions


def version_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command ``--version``; its value is None by default."""
    return click.option("--version", type=VersionType(), help=help_text)


def json_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help=help_text)
