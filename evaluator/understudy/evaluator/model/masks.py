"""Keras's masks, which are attributes of tensors and are lost when a tensor is copied."""

from __future__ import annotations

from typing import Any

_ATTRIBUTE = "_keras_mask"


def mask_of(tensor: Any) -> Any:
    """Return the mask that a layer set on a tensor, or None."""
    return getattr(tensor, _ATTRIBUTE, None)


def put_mask(tensor: Any, mask: Any) -> None:
    """Set a tensor's mask, as losses and metrics expect it."""
    setattr(tensor, _ATTRIBUTE, mask)
