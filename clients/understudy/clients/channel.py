"""Channel configuration: addresses, limits, keepalive, and the service config for retries and load balancing."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # generic in the stubs only
    import grpc

    Interceptor = (
        grpc.UnaryUnaryClientInterceptor[Any, Any]
        | grpc.UnaryStreamClientInterceptor[Any, Any]
        | grpc.StreamUnaryClientInterceptor[Any, Any]
        | grpc.StreamStreamClientInterceptor[Any, Any]
    )

DEFAULT_MAX_MESSAGE_BYTES: Final = 256 * 1024 * 1024

Option = tuple[str, Any]
"""The name of a channel option and its value."""

_REPEATABLE: Final = {
    "understudy.v1.PredictionService": ("Predict", "PredictStream"),
    "understudy.v1.EvaluationService": (
        "Evaluate",
        "EvaluateDataset",
        "Compare",
        "Replay",
        "ListEvaluations",
        "GetEvaluationTables",
        "GetExamples",
    ),
    "understudy.v1.ModelService": ("GetModelMetadata", "GetModelStatus", "ListCheckpoints"),
    "understudy.v1.FleetService": ("GetFleet",),
    "understudy.v1.MetricsService": ("GetMetrics",),
}
"""Calls that are safe to retry. Promote is not, since a roll-back is not idempotent. WatchEvaluations is left out
because the clients resume it themselves."""

_RETRY_POLICY: Final = {
    "maxAttempts": 5,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
}
"""A server of grpcio that shuts down cancels calls that were sent before its GOAWAY was read. gRPC does not retry what
the caller itself cancels."""
_KEEPALIVE_SECONDS: Final = 30
_KEEPALIVE_TIMEOUT_SECONDS: Final = 10
_RECONNECT_SECONDS: Final = 5

_LOCAL_SCHEMES: Final = ("unix:", "unix-abstract:")
_ADDRESSES: Final = re.compile(r"(?:ipv4:|ipv6:|dns:(?:///)?)?(?P<addresses>[^/]+)")
_URL: Final = re.compile(r"(?:https?|grpcs?)://(?P<address>[^/]*)")
_WITH_PORT: Final = re.compile(r"(?P<host>\[.*\]|[^:]*):\d+")


def service_config() -> str:
    """Return the service config as JSON: retry where that is safe, and balance targets round-robin."""
    repeatable = [
        {"service": service, "method": method} for service, methods in _REPEATABLE.items() for method in methods
    ]
    config: dict[str, Any] = {
        "loadBalancingConfig": [{"round_robin": {}}],
        "methodConfig": [{"name": repeatable, "retryPolicy": _RETRY_POLICY}],
    }
    return json.dumps(config)


def channel_options(targets: str | Sequence[str], max_message_bytes: int, own: Sequence[Option]) -> list[Option]:
    """Return the options of a channel to these targets, for messages up to this size.

    The caller's own replace ours of the same name. Targets on this machine are not called through a proxy, whatever the
    environment says.
    """
    several = [targets] if isinstance(targets, str) else targets
    ours: list[Option] = [
        *([("grpc.enable_http_proxy", 0)] if all(map(is_on_this_machine, several)) else []),
        ("grpc.service_config", service_config()),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_SECONDS * 1000),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_SECONDS * 1000),
    ]
    return list(dict([*ours, *own]).items())


def channel_target(targets: str | Sequence[str]) -> str:
    """Return one gRPC target for one or several servers.

    One target is returned unchanged, so any of gRPC's naming schemes works. Several targets are ``HOST:PORT`` each;
    their names are resolved here, once.

    Raises:
        ValueError: There is no target, one is a URL, one of several is not ``HOST:PORT``, or a name cannot be resolved.
    """
    several = [targets] if isinstance(targets, str) else list(targets)
    if not several or not all(several):
        raise ValueError(f"expected at least one target such as '127.0.0.1:8500', got {targets!r}")
    if url := next(filter(None, map(_URL.match, several)), None):
        raise ValueError(f"expected HOST:PORT, got the URL {url.string!r}; give {url['address']!r}")
    if len(several) == 1:
        return several[0]
    hosts = [_host_and_port(target) for target in several]
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):
        addresses = [_address(host, port, family) for host, port in hosts]
        if all(addresses):
            return f"{scheme}:{','.join(map(str, addresses))}"
    raise ValueError(f"not all of {', '.join(several)} can be looked up as addresses of one family, IPv4 or IPv6")


def is_on_this_machine(target: str) -> bool:
    """Return whether all addresses of a gRPC target are loopback addresses or Unix sockets, as text."""
    if target.startswith(_LOCAL_SCHEMES):
        return True
    found = _ADDRESSES.fullmatch(target)
    return found is not None and all(_is_loopback(address) for address in found["addresses"].split(","))


def _is_loopback(address: str) -> bool:
    found = _WITH_PORT.fullmatch(address)
    host = (address if found is None else found["host"]).strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_and_port(target: str) -> tuple[str, int]:
    host, colon, port = target.rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise ValueError(f"expected HOST:PORT, got {target!r}")
    return host.strip("[]"), int(port)


def _address(host: str, port: int, family: socket.AddressFamily) -> str | None:
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except socket.gaierror:
        return None
    address = str(found[0][4][0])
    return f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}"
