"""How many handles are out in this process."""

from __future__ import annotations

import gc

from understudy.evaluator.lifecycle.servable import Servable


def handles_out() -> int:
    """Return the handles that are out, of all servables there are."""
    servables = [thing for thing in gc.get_objects() if type(thing) is Servable]
    return sum(servable.handles for servable in servables)
