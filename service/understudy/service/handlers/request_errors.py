"""Errors of requests that the handlers refuse.

UnknownModelError                 the request names a model that this server does not serve
UnknownServiceError               a health request names a service that this server does not have
UnsupportedError                  this server does not support a call or a setting of the protocol
"""

from __future__ import annotations


class UnknownModelError(Exception):
    """The request names a model that this server does not serve. The text names the served model."""


class UnknownServiceError(Exception):
    """A health request names a service that this server does not have. The text lists the services."""


class UnsupportedError(Exception):
    """This server does not support a call or a setting of the protocol. The text says what to do instead."""
