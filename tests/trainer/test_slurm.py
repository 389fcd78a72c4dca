"""Slurm's lists of nodes, and of the tasks on each."""

from __future__ import annotations

import itertools
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.python.distribute.cluster_resolver import slurm_cluster_resolver

from understudy.trainer import TFConfigError
from understudy.trainer.slurm import MOST_NODES, expand_nodes, expand_task_counts

NAMES = st.text(string.ascii_letters + "-._", min_size=1, max_size=6)
PADDED = st.tuples(st.integers(0, 120), st.integers(0, 5), st.integers(1, 5))


def range_of(low: int, more: int, width: int) -> tuple[str, list[str]]:
    """Return a range in brackets, and the numbers in it."""
    first = str(low).zfill(width)
    numbers = [str(number).zfill(len(first)) for number in range(low, low + more + 1)]
    return (first if more == 0 else f"{first}-{low + more}"), numbers


@st.composite
def items(draw: st.DrawFn, *, most_brackets: int) -> tuple[str, list[str]]:
    """Draw an item such as ``rack[0-1]n[1,3-4]``, and the names that it stands for."""
    text = draw(NAMES)
    parts: list[list[str]] = [[text]]
    for _ in range(draw(st.integers(0, most_brackets))):
        ranges = [range_of(*drawn) for drawn in draw(st.lists(PADDED, min_size=1, max_size=3))]
        text += f"[{','.join(each for each, _ in ranges)}]"
        parts.append([number for _, numbers in ranges for number in numbers])
        if most_brackets > 1 and draw(st.booleans()):
            suffix = draw(NAMES)
            text += suffix
            parts.append([suffix])
    return text, ["".join(choice) for choice in itertools.product(*parts)]


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("localhost", ["localhost"]),
        ("10-0-3-12", ["10-0-3-12"]),
        ("node[1-2]", ["node1", "node2"]),
        ("n[9-10]", ["n9", "n10"]),  # in Slurm's order, which is not that of the names
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("gpu[08-10]-ib.cluster", ["gpu08-ib.cluster", "gpu09-ib.cluster", "gpu10-ib.cluster"]),
        ("rack[0-1]n[1-2]", ["rack0n1", "rack0n2", "rack1n1", "rack1n2"]),
    ],
)
def test_a_list_of_nodes_is_expanded_in_its_order(text: str, nodes: list[str]) -> None:
    assert list(expand_nodes(text, "LIST")) == nodes


@given(st.lists(items(most_brackets=2), min_size=1, max_size=4))
def test_any_list_is_expanded_to_the_names_it_was_made_from(drawn: list[tuple[str, list[str]]]) -> None:
    text = ",".join(each for each, _ in drawn)
    assert list(expand_nodes(text, "LIST")) == [name for _, names in drawn for name in names]


@given(st.lists(items(most_brackets=1), min_size=1, max_size=4))
def test_tensorflow_expands_the_lists_that_it_can_read_alike(drawn: list[tuple[str, list[str]]]) -> None:
    text = ",".join(each for each, _ in drawn)
    assert list(expand_nodes(text, "LIST")) == slurm_cluster_resolver.expand_hostlist(text)


@given(st.text("ab0129[],-.()x ", max_size=20))
def test_any_text_is_expanded_to_host_names_or_refused_in_a_sentence(text: str) -> None:
    try:
        nodes = expand_nodes(text, "LIST")
    except TFConfigError as error:
        assert str(error).startswith("LIST ")  # noqa: PT017 - either is right
        return
    assert nodes
    assert all(set(node) <= set("ab0129-.x") and node for node in nodes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected nodes such as"),
        ("n[1-2", "brackets do not match at character 1|character 1"),
        ("n1,,n2", "character 3 begins none"),
        ("n]", "brackets do not match"),
        ("n[]", r"n\[\]'; expected numbers"),
        ("n[1-2-3]", "expected numbers"),
        ("n[5-3]", "whose range 5-3 ends before it begins"),
        ("n 1", "which is no host name"),
        ("n[0-999999999]", f"more than {MOST_NODES} nodes"),
        ("n[0-999][0-999]", f"more than {MOST_NODES} nodes"),
        ("n[" + "1-60000," * 2 + "1]", f"more than {MOST_NODES} nodes"),
        ("n[" + "9" * 5000 + "]", "expected numbers"),
    ],
)
def test_what_is_no_list_of_nodes_is_refused(text: str, message: str) -> None:
    with pytest.raises(TFConfigError, match=message):
        expand_nodes(text, "SLURM_STEP_NODELIST")


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5))
def test_counts_of_tasks_are_expanded_node_by_node(drawn: list[tuple[int, int]]) -> None:
    text = ",".join(str(count) if repeats == 1 else f"{count}(x{repeats})" for count, repeats in drawn)
    expected = [count for count, repeats in drawn for _ in range(repeats)]
    assert list(expand_task_counts(text, "COUNTS")) == expected
    assert slurm_cluster_resolver.expand_tasks_per_node(text) == expected


@pytest.mark.parametrize("text", ["", "2,", "0", "2(x0)", "2(3)", "x2", "-1", "2(x99999)", "99999(x9)", "٣"])
def test_what_is_no_list_of_counts_is_refused(text: str) -> None:
    with pytest.raises(TFConfigError, match=r"^COUNTS "):
        expand_task_counts(text, "COUNTS")
