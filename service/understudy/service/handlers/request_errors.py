"""What the handlers refuse.

UnknownModelError                 the request names a model that is not served here
UnknownServiceError               the health of a service was asked for that is not served here
UnsupportedError                  the protocol has a call or a setting that this server does not
"""

from __future__ import annotations


class UnknownModelError(Exception):
    """The request names a model that is not served here. The text names the one that is."""


class UnknownServiceError(Exception):
    """The health of a service was asked for that is not served here. The text names those that are."""


class UnsupportedError(Exception):
    """The protocol has a call or a setting that this server does not. The text says what to do instead."""
