"""What kind of change is between two texts, and what is the same behind it."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.chat.prefixes.change import GRAM, describe, resync
from quire.chat.prefixes.recent import common
from tests.unit.chat.prefixes.kit import tokenizer

WORDS = tokenizer()
HEAD = "You are an agent that works on a computer for somebody. "
TAIL = " Whatever comes behind is the same in both of the prompts, word for word, to the end of it."


def ids(text: str) -> array[int]:
    return array("i", WORDS.encode(text, add_special=False, parse_special=False))


def change(before: str, now: str, head: str = HEAD, tail: str = TAIL) -> tuple[str, str, str, int]:
    old, new = ids(head + before + tail), ids(head + now + tail)
    at = common(old, new)
    made = describe(old, new, at, resync(old, new, at), lambda part: WORDS.decode(part, at_start=False))
    return made.kind, made.before, made.now, made.again


@pytest.mark.parametrize(
    ("kind", "before", "now"),
    [
        ("date", "Today is 2026-11-19.", "Today is 2026-11-20."),
        ("date", "It is 2026-11-19T10:11:12.123Z now", "It is 2026-11-19T10:11:59.001Z now"),
        ("date", "Today's date: Thu Nov 19 2026", "Today's date: Fri Nov 20 2026"),
        ("date", "Date: November 9, 2026", "Date: November 19, 2026"),
        ("date", "at 10:31 PM", "at 10:32 PM"),
        ("id", "id 51802154-c298-426a-b4ec-ed8980b48641", "id 51802154-d198-426a-b4ec-ed8980b48699"),
        ("id", "session 7d1f0a99b2", "session 81aa0c99e4"),
        ("id", "msg_01a1f5e2a7d87c81", "msg_01a1f5e2a7d99d22"),
        ("number", "You have 1412 tokens left", "You have 1399 tokens left"),
        ("path", "cwd /home/ann/work/one", "cwd /home/ann/work/two"),
        ("order", '{"type": "string", "minimum": 1}', '{"minimum": 1, "type": "string"}'),
        ("order", "alpha beta gamma", "beta alpha gamma"),
        ("billing", "x-anthropic-billing-header: cc_version=2.1; cch=7d1f0;", "x-anthropic-billing-header: cc_version=2.1; cch=00000;"),
        ("inserted", "", "and somebody wrote this between the two. "),
        ("removed", "and somebody wrote this between the two. ", ""),
        ("other", "be brief", "say much"),
    ],
)  # fmt: skip
def test_kinds(kind: str, before: str, now: str):
    found, was, made, again = change(before, now)
    assert found == kind
    assert len(TAIL) - GRAM <= again <= len(TAIL) + len(now)
    if kind not in ("inserted", "removed", "order", "other"):
        assert was in before + TAIL
        assert made in now + TAIL
        assert was != made


def test_a_block_that_moved_is_an_order():
    one, two = "the first tool does this and that. ", "a second tool is for other things. "
    assert change(one + two, two + one)[0] == "order"


def test_a_git_status_is_told_as_one():
    status = "gitStatus: This is the git status at the start.\n\nCurrent branch: master\n\nStatus:\n"
    assert change("(clean)", "M a.py", head=HEAD + status)[0] == "git"


@given(st.lists(st.integers(0, 3), max_size=600), st.lists(st.integers(0, 3), max_size=600))
def test_common_is_the_common_prefix(a: list[int], b: list[int]):
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common(array("i", a), array("i", b)) == expected


PIECES = st.lists(
    st.tuples(st.integers(0, 150), st.integers(0, 60), st.lists(st.integers(0, 1), max_size=4)), max_size=6
)


@given(st.lists(st.integers(0, 9), min_size=40, max_size=150), PIECES, st.integers(0, 5))
def test_what_comes_again_is_counted_as_by_hand(a: list[int], pieces: list[tuple[int, int, list[int]]], at: int):
    """A token comes again when it lies in a stretch that the other tail has too."""
    b = [token for start, length, between in pieces for token in (*a[start : start + length], *between)]
    old, new = a[at:], b[at:]
    grams = {tuple(old[i : i + GRAM]) for i in range(len(old) - GRAM + 1)}
    hit = {k for j in range(len(new) - GRAM + 1) if tuple(new[j : j + GRAM]) in grams for k in range(j, j + GRAM)}
    found = resync(array("i", a), array("i", b), at)
    assert found.again == len(hit)
    if hit:
        assert found.new == min(hit)
        assert old[found.old : found.old + GRAM] == new[found.new : found.new + GRAM]
