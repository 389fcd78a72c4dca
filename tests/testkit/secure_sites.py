"""Services with TLS and a file of callers, with and without client certificates, for clients of every kind."""

from __future__ import annotations

import dataclasses
import json
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme
from grpc import ChannelCredentials, ssl_channel_credentials

from testkit.certificates import Credentials
from testkit.checkpoints import Chief
from testkit.in_process import running_service
from understudy.service.callers.callers_file import hash_text
from understudy.service.calls.caller import Group

STEP = 10
TOKEN = "of-the-caller"  # noqa: S105 - of a test
READERS_TOKEN = "of-the-reader"  # noqa: S105
"""The token of a caller that may predict, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A service, and the files with which its caller calls it.

    Attributes:
        name: The front end, and what a caller needs beside the authority: ``token``, or a ``certificate`` as well.
        grpc: Its gRPC address.
        http: Its HTTP address.
        ca: The authority of its certificate.
        certificate: The caller's certificate; None if the service asks for none.
        key: Its key.
        token: The caller's token.
        token_file: The file of the token.
    """

    name: str
    grpc: str
    http: str
    ca: str
    certificate: str | None
    key: str | None
    token: str
    token_file: str

    @property
    def needs_certificate(self) -> bool:
        return self.certificate is not None

    def channel(self) -> ChannelCredentials:
        """Return the credentials of a channel, without the token."""
        ca, key, certificate = (
            None if file is None else Path(file).read_bytes() for file in (self.ca, self.key, self.certificate)
        )
        return ssl_channel_credentials(ca, key, certificate)

    def context(self) -> ssl.SSLContext:
        """Return the context of a connection over HTTPS."""
        context = ssl.create_default_context(cafile=self.ca)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context

    def environment(self) -> dict[str, str]:
        """Return the variables for the commands and the examples."""
        files = {"CA": self.ca, "CERT": self.certificate, "KEY": self.key}
        variables = {f"UNDERSTUDY_TLS_{name}": file for name, file in files.items() if file is not None}
        return {**variables, "UNDERSTUDY_TOKEN_FILE": self.token_file, "UNDERSTUDY_TARGET": self.grpc}


@contextmanager
def serving_sites(folder: Path, front_ends: tuple[str, ...], replicas: tuple[str, ...]) -> Iterator[list[Site]]:
    """Serve one checkpoint of `testkit.checkpoints` on each front end, with and without client certificates."""
    Chief(folder / "run").publish(STEP)
    authority = trustme.CA()
    server = Credentials(folder / "server", authority, "127.0.0.1")
    caller = Credentials(folder / "caller", authority, "caller")
    token_file, callers_file = folder / "token", folder / "callers.toml"
    token_file.write_text(TOKEN + "\n", encoding="ascii")
    entries = (("caller", TOKEN, tuple(Group)), ("reader", READERS_TOKEN, (Group.PREDICT,)))
    callers_file.write_text("".join(_entry(*each) for each in entries), encoding="utf-8")

    def start(front_end: str, way: str) -> Site:
        has_certificates = way == "certificate"
        name = f"{front_end} {way}"
        settings: dict[str, Any] = {
            "run_dir": folder / "run",
            "tls_cert": server.certificate,
            "tls_key": server.key,
            "callers": callers_file,
            **({"tls_client_ca": server.ca} if has_certificates else {}),
        }
        service = stack.enter_context(
            running_service(settings, {}, replicas=replicas, state_dir=folder / name, front_end=front_end)
        )
        service.wait_ready()
        return Site(
            name=name,
            grpc=service.grpc,
            http=service.http,
            ca=str(caller.ca),
            certificate=str(caller.certificate) if has_certificates else None,
            key=str(caller.key) if has_certificates else None,
            token=TOKEN,
            token_file=str(token_file),
        )

    ways = [(front_end, way) for front_end in front_ends for way in ("token", "certificate")]
    with ExitStack() as stack, ThreadPoolExecutor() as starting:
        yield list(starting.map(lambda each: start(*each), ways))


def _entry(name: str, token: str, groups: tuple[Group, ...]) -> str:
    allowed = json.dumps([group.value for group in groups])
    return f'[[callers]]\nname = "{name}"\ngroups = {allowed}\ntokens = ["{hash_text(token)}"]\n'


def write_sites(sites: list[Site], file: Path) -> None:
    """Write them for a program of another environment."""
    file.write_text(json.dumps([dataclasses.asdict(site) for site in sites]), encoding="utf-8")
