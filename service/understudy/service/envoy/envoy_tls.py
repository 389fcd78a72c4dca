"""TLS in Envoy: its configuration, and the files through which it gets the certificates.

Envoy watches each file (its secret discovery service) and uses new content for new connections.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, Final

from understudy.service.tls import Certificates

_TYPES: Final = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3"
_SERVER: Final = "server"
_CLIENT_CA: Final = "client-ca"


def transport_socket(folder: Path, certificates: Certificates) -> dict[str, Any]:
    """Return the configuration of TLS with the files that `write_secrets` writes into a folder."""
    common: dict[str, Any] = {
        "alpn_protocols": ["h2"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2", "tls_maximum_protocol_version": "TLSv1_3"},
        "tls_certificate_sds_secret_configs": [_source(folder, _SERVER)],
    }
    if certificates.client_ca is not None:
        common["validation_context_sds_secret_config"] = _source(folder, _CLIENT_CA)
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": f"{_TYPES}.DownstreamTlsContext",
            "common_tls_context": common,
            "require_client_certificate": certificates.client_ca is not None,
        },
    }


def write_secrets(folder: Path, certificates: Certificates) -> None:
    """Write the files for Envoy; each write is atomic, and only this user can read them.

    Raises:
        OSError: A file cannot be written.
    """
    pair = {"certificate_chain": _inline(certificates.certificate), "private_key": _inline(certificates.key)}
    _write(folder, _SERVER, {"tls_certificate": pair})
    if certificates.client_ca is not None:
        _write(folder, _CLIENT_CA, {"validation_context": {"trusted_ca": _inline(certificates.client_ca)}})


def _source(folder: Path, name: str) -> dict[str, Any]:
    path = {"path": str(_file(folder, name))}
    return {"name": name, "sds_config": {"resource_api_version": "V3", "path_config_source": path}}


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _inline(content: bytes) -> dict[str, str]:
    return {"inline_bytes": base64.b64encode(content).decode("ascii")}


def _write(folder: Path, name: str, secret: dict[str, Any]) -> None:
    file = _file(folder, name)
    unfinished = file.with_suffix(".unfinished")
    content = json.dumps({"resources": [{"@type": f"{_TYPES}.Secret", "name": name, **secret}]})
    unfinished.touch(mode=0o600)
    unfinished.write_text(content, encoding="utf-8")
    unfinished.replace(file)
