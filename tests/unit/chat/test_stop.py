from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.chat.choice import StopStrings


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first moment at which the text so far ends with a stop string; of several, the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include=include)
    out = "".join(matcher.feed(piece) for piece in pieces) + matcher.finish()
    return out, matcher.matched


ALPHABET = st.text("abc", max_size=12)


@given(st.lists(ALPHABET, max_size=8), st.lists(st.text("abc", min_size=1, max_size=4), max_size=4), st.booleans())
def test_equals_a_naive_search_whatever_the_pieces(pieces: list[str], stops: list[str], include: bool):
    assert run(pieces, stops, include) == naive("".join(pieces), stops, include)


@pytest.mark.parametrize("text", ["aabaabaaab", "abcabcabd", "aaaaab"])
def test_all_splits_in_two_and_single_characters(text: str):
    stops = ["aab", "abd", "caz"]
    expected = naive(text, stops, False)
    for cut in range(len(text) + 1):
        assert run([text[:cut], text[cut:]], stops, False) == expected
    assert run(list(text), stops, False) == expected


@given(st.lists(ALPHABET, max_size=8), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_holds_back_no_more_than_it_must(pieces: list[str], stops: list[str]):
    matcher, fed, out = StopStrings(stops), "", ""
    for piece in pieces:
        fed += piece
        out += matcher.feed(piece)
        if matcher.matched is not None:
            return
        held = fed[len(out) :]
        longest = max(k for k in range(len(fed) + 1) if k == 0 or any(s.startswith(fed[-k:]) for s in stops))
        assert len(held) == longest


def test_nothing_after_a_match():
    matcher = StopStrings(["END"])
    assert matcher.feed("one EN") == "one "
    assert matcher.feed("D two") == ""
    assert matcher.matched == "END"
    assert matcher.feed("three") == "" and matcher.finish() == ""


def test_the_worst_stop_strings_stay_cheap():
    stops = ["a" * (1000 + i) + "b" for i in range(16)]
    matcher = StopStrings(stops)
    start = time.process_time()
    for _ in range(2000):
        matcher.feed("aac")
        matcher.feed("a")
    assert time.process_time() - start < 5
