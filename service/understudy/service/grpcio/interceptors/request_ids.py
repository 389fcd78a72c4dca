"""Gives every call an id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from understudy.service import request_id
from understudy.service.grpcio.interceptors.base import AroundInterceptor, Context


class RequestIdInterceptor(AroundInterceptor):
    """Takes the caller's ``x-request-id`` or makes one, and sends it back in the trailing metadata; logs show it."""

    @contextmanager
    def around(self, path: str, context: Context) -> Iterator[None]:
        """See `AroundInterceptor`."""
        del path
        came = next((value for key, value in context.invocation_metadata() or () if key == request_id.HEADER), None)
        identifier = request_id.accept(came)
        request_id.current.set(identifier)
        context.set_trailing_metadata(((request_id.HEADER, identifier),))
        yield
