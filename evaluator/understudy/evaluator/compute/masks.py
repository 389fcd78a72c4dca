"""Keras's masks, which travel as an attribute of a tensor and are lost when the tensor is passed on."""

from __future__ import annotations

from typing import Any

_ATTRIBUTE = "_keras_mask"


def mask_of(tensor: Any) -> Any:
    """Return the mask a layer has put on a tensor, or None."""
    return getattr(tensor, _ATTRIBUTE, None)


def put_mask(tensor: Any, mask: Any) -> None:
    """Put a mask on a tensor, where losses and metrics look for it."""
    setattr(tensor, _ATTRIBUTE, mask)
