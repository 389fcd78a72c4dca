"""Draws small grey images with characters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_SHADES = " ░▒▓█"


def rows_of_image(image: npt.NDArray[np.float32]) -> list[str]:
    """Draw one image.

    Args:
        image: Grey values in 0..1, ``[height, width]``.

    Returns:
        One line per row of pixels, two characters per pixel, since characters are about twice as high as wide.
    """
    levels = np.clip(image * len(_SHADES), 0, len(_SHADES) - 1).astype(int)
    return ["".join(_SHADES[level] * 2 for level in row) for row in levels]


def side_by_side(images: npt.NDArray[np.float32], captions: Sequence[str]) -> str:
    """Draw images ``[n, height, width]`` in one line, each with its caption below."""
    drawings = [rows_of_image(image) for image in images]
    width = len(drawings[0][0])
    lines = ["  ".join(parts) for parts in zip(*drawings, strict=True)]
    lines.append("  ".join(caption.center(width) for caption in captions))
    return "\n".join(lines)
