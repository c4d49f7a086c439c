"""JsonText against Python's own parser: the same texts are JSON, and where a value ends does not depend on the cuts."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.chat.tools.jsontext import JsonText

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def fed(text: str, cuts: list[int]) -> tuple[str, str, bool]:
    """What was handed on, what was left, and whether it was a whole value."""
    value, out = JsonText(), []
    places = [0, *sorted({c % (len(text) + 1) for c in cuts}), len(text)]
    rest = ""
    for a, b in itertools.pairwise(places):
        piece = text[a:b]
        end = 0
        if not value.done and not value.failed:
            passed, end = value.feed(piece, 0)
            out.append(passed)
        rest += piece[end:]
    if not value.done and not value.failed:
        value.finish()
    return "".join(out), rest, value.done and not value.failed


@settings(max_examples=60, deadline=None)
@given(VALUES, st.lists(st.integers(0, 999), max_size=6), st.sampled_from([None, 1]), st.booleans())
def test_a_value_ends_where_it_ends(value, cuts, indent, ascii):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    tail = "," if value is None or isinstance(value, int | float) else "tail"
    assert fed(text + tail, cuts) == (text, tail, True)


@settings(max_examples=120, deadline=None)
@given(st.text(alphabet='{}[]",:\\u0aef1-.e+truefalsn \n', max_size=14), st.lists(st.integers(0, 99), max_size=3))
def test_the_same_texts_are_json_as_for_python(text, cuts):
    try:
        json.loads(text, strict=False, parse_constant=lambda name: 1 / 0)
        wanted = True
    except (ValueError, ZeroDivisionError):
        wanted = False
    out, rest, whole = fed(text, cuts)
    assert (whole and not rest.strip()) == wanted
    if wanted:
        assert json.loads(out) == json.loads(text, strict=False)
    assert (out + rest).replace("\\n", "\n") == text.replace("\\n", "\n")


def test_control_characters_in_strings_become_escapes():
    assert fed('{"a": "x\ny\tz\x01"}', [5, 9]) == ('{"a": "x\\ny\\tz\\u0001"}', "", True)


def test_depth_is_bounded():
    assert fed("[" * 5000, [])[2] is False


@pytest.mark.parametrize(
    "text",
    [
        '{"a" 1}',
        '{"a"=1}',
        "{1: 2}",
        '{"a": 1,}',
        "[1,]",
        "[1 2]",
        "{,}",
        "01",
        "1.",
        "+1",
        "tru",
        '"\\x"',
        '"\\u12g4"',
        "[}",
        "nan",
    ],
)
def test_what_is_no_json(text):
    for cuts in ([], list(range(len(text)))):
        out, rest, whole = fed(text, cuts)
        assert not whole and out + rest == text
