"""Inspects the files of checkpoints in separate processes with limits, before this process reads them."""

from understudy.checkpoints.inspection.inspector import inspect_content, inspect_structure

__all__ = ["inspect_content", "inspect_structure"]
