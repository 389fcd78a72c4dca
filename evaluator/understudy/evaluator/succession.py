"""Which evaluators another one replaces, so that servers that follow go over to it by themselves."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from understudy.checkpoints.atomic import write_json

REPLACED_FILE = "replaced.json"
"""In the state folder: the identities of evaluators whose state folder was at its path before."""

MAX_REPLACED = 16
"""How many an evaluator remembers; a server that has not followed for as many trainings needs an operator."""

EVALUATOR_ID = re.compile(r"[0-9a-f]{32}")

_log = logging.getLogger(__name__)


def newest_first(*identities: Iterable[str]) -> tuple[str, ...]:
    """Return these identities without those that repeat or are none; the first `MAX_REPLACED` at most."""
    found = dict.fromkeys(each for group in identities for each in group if EVALUATOR_ID.fullmatch(each))
    return tuple(found)[:MAX_REPLACED]


def read_replaced(state_dir: Path) -> tuple[str, ...]:
    """Return the identities of the evaluators that the one of a state folder replaces, newest first."""
    file = state_dir / REPLACED_FILE
    try:
        return newest_first(map(str, json.loads(file.read_bytes())))
    except FileNotFoundError:
        return ()
    except (OSError, TypeError, ValueError) as error:
        _log.warning(
            "cannot read which evaluators this one replaces, so servers that follow one of them stay with it",
            extra={"file": str(file), "reason": str(error)},
        )
        return ()


def write_replaced(state_dir: Path, identities: Iterable[str]) -> None:
    """Note in a state folder, which may not exist yet, which evaluators the one that starts there replaces.

    If it cannot be written, the servers that follow one of them stay with it, and this is logged.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        write_json(state_dir / REPLACED_FILE, newest_first(identities))
    except OSError as error:
        _log.warning(
            "cannot note which evaluators the next one here replaces, so servers that follow one of them stay with it",
            extra={"reason": str(error)},
        )
