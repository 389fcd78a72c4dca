"""Measurements of the service, side by side with the floor it stands on and with other servers."""
