"""The service's own exceptions, raised while it starts.

ServiceError
├── SettingsError                 a setting cannot be used
└── PortInUseError                another process listens where this one should
"""

from __future__ import annotations


class ServiceError(Exception):
    """The root of what keeps the service from starting. Its text is meant for whoever started it."""


class SettingsError(ServiceError, ValueError):
    """A setting cannot be used. The text names it, what came and what was expected."""


class PortInUseError(ServiceError):
    """Another process listens where this one should. The text names the address and the flag to change."""
