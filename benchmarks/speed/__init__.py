"""Measurements of the service, beside its floor and other servers."""
