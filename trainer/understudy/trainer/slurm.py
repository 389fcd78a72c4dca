"""Slurm's compressed lists: the nodes of a job step, and how many tasks each of them has.

TensorFlow's `SlurmClusterResolver` is not used: it sorts the nodes by name, although Slurm numbers tasks in the order
of the list, and it runs ``nvidia-smi``. See docs/decisions/clusters.md.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from understudy.trainer.trainer_errors import TFConfigError

MOST_NODES = 65_533
"""Slurm's own limit, of nodes and here also of the tasks in one step."""

_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_LITERAL = re.compile(r"[A-Za-z0-9._-]+")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


def expand_nodes(text: str, name: str) -> tuple[str, ...]:
    """Return the nodes of a list such as ``login1,gpu[01-03,07],rack[0-1]n[1-2]``, in its order.

    Args:
        text: The list.
        name: The variable that holds it, for the errors.

    Raises:
        TFConfigError: It is no such list, or names more nodes than Slurm can have.
    """
    nodes: list[str] = []
    for item in _items(text, name):
        parts = [_part(match, item, name) for match in _PART.finditer(item)]
        size = 1
        for part in parts:
            size *= len(part)
        if len(nodes) + size > MOST_NODES:
            raise TFConfigError(f"{name} names more than {MOST_NODES} nodes, which Slurm cannot have")
        nodes += ["".join(choice) for choice in itertools.product(*parts)]
    return tuple(nodes)


def expand_task_counts(text: str, name: str) -> tuple[int, ...]:
    """Return the tasks of each node from a list such as ``2(x3),1``, which is 2, 2, 2, 1.

    Raises:
        TFConfigError: It is no such list, or names more tasks than `MOST_NODES`.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        count, repeats = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if not count or not repeats:
            raise TFConfigError(f"{name} is {text[:80]!r}; expected counts such as 2(x3),1, and {item[:40]!r} is none")
        if count * repeats + sum(counts) > MOST_NODES:
            raise TFConfigError(f"{name} names more than {MOST_NODES} tasks")
        counts += [count] * repeats
    return tuple(counts)


def _items(text: str, name: str) -> Iterator[str]:
    """Yield what the commas outside of brackets separate."""
    position = 0
    while True:
        match = _ITEM.match(text, position)
        if match is None:
            raise TFConfigError(
                f"{name} is {text[:80]!r}; expected nodes such as gpu[01-03,07], and character {position} begins none"
            )
        yield match[0]
        position = match.end()
        if position == len(text):
            return
        if text[position] != ",":
            raise TFConfigError(f"{name} is {text[:80]!r}, whose brackets do not match at character {position}")
        position += 1


def _part(match: re.Match[str], item: str, name: str) -> tuple[str, ...]:
    """Return the texts that one part of an item stands for: itself, or the numbers in brackets."""
    ranges, literal = match.groups()
    if literal is not None:
        if not _LITERAL.fullmatch(literal):
            raise TFConfigError(f"{name} names {item[:80]!r}, which is no host name")
        return (literal,)
    numbers: list[str] = []
    for text in ranges.split(","):
        numbers += _numbers(text, item, name)
        if len(numbers) > MOST_NODES:
            raise TFConfigError(f"{name} names more than {MOST_NODES} nodes, which Slurm cannot have")
    return tuple(numbers)


def _numbers(text: str, item: str, name: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise TFConfigError(f"{name} names {item[:80]!r}; expected numbers such as 1, 3-5 or 01-16 in the brackets")
    low, high = int(match[1]), int(match[2] or match[1])
    if high < low:
        raise TFConfigError(f"{name} names {item[:80]!r}, whose range {text} ends before it begins")
    if high - low >= MOST_NODES:
        raise TFConfigError(f"{name} names more than {MOST_NODES} nodes, which Slurm cannot have")
    return [str(number).zfill(len(match[1])) for number in range(low, high + 1)]
