"""Counts the living objects of a class.

`gc.get_objects` would find them too, but it holds a reference to every object. A tuple that another thread is building
must have one reference only: Python then raises SystemError in that thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet


@contextmanager
def living(kind: type) -> Iterator[WeakSet[Any]]:
    """Yield a set that holds every object of a class that was made inside the ``with`` block and is not freed yet.

    An object that nothing refers to is in it until it is collected. The class has ``__new__`` or ``__init__``.
    """
    found: WeakSet[Any] = WeakSet()
    name = "__new__" if "__new__" in kind.__dict__ else "__init__"
    own: Any = getattr(kind, name)

    def make(first: Any, *args: Any, **kwargs: Any) -> Any:
        made = own(first, *args, **kwargs)
        found.add(first if made is None else made)
        return made

    setattr(kind, name, make)
    try:
        yield found
    finally:
        setattr(kind, name, own)
