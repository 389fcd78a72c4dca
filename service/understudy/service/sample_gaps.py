"""How many items to pass over between two of a sample."""

from __future__ import annotations

import math
import random
from collections.abc import Callable


class SampleGaps:
    """The gaps of a sample that takes every item with the same probability, independently of the others.

    They are geometric variates, so an item outside of the sample costs a subtraction.

    Args:
        share: The probability of an item, from 0 to 1.
        generator: Returns uniform numbers from 0 up to, but without, 1.
    """

    def __init__(self, share: float, generator: Callable[[], float] = random.random) -> None:
        self._log_of_others = math.log1p(-share) if share < 1 else -math.inf
        self._generator = generator

    def draw(self) -> float:
        """Return how many items to pass over before the next one of the sample; infinite if there will be none."""
        if not self._log_of_others:
            return math.inf
        gap = math.log(1.0 - self._generator()) / self._log_of_others
        return gap if math.isinf(gap) else int(gap)
