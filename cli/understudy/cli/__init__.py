"""The ``understudy`` command."""
