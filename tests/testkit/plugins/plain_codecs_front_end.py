"""A front end as another package would add it: grpcio's, for a service without the fast path of predictions."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

from understudy.service.front_end import Main
from understudy.service.grpcio import grpc_server
from understudy.service.services import plain_codecs
from understudy.service.settings import ServeSettings

_T = TypeVar("_T")


def run(settings: ServeSettings, main: Main[_T]) -> _T:
    """Run the service; see `understudy.service.front_end.RunFrontEnd`."""
    server: Any = importlib.import_module("understudy.service.server")
    server.template_codecs = plain_codecs
    return grpc_server.run(settings, main)
