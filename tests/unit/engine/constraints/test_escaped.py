"""Lark grammars written anew: what is refused, and that a hostile one costs little. What they allow is tested with the formats of calls."""

from __future__ import annotations

import contextlib
import re
import time

import pytest

from quire.engine.constraints.escaped import MAX_BYTES, escaped, pattern_of

REFUSED = [
    ('start: "a"\n%ignore " "\n', "%ignore"),
    ('start: %json {"type": "object"}\n', "%json"),
    ("start: <think>\n", "<think>"),
    ("start: @other\n", "@other"),
    ("start: /a(?=b)/\n", "(?=b)"),
    ("start: /^a/\n", "^a"),
    ("start: /a/x\n", "flags"),
    ("start: other\n", "no rule 'other'"),
    ('other: "a"\n', "no rule start"),
    ('start: "a"\nstart: "b"\n', "two rules"),
    ('start: "a".."bc"\n', "range"),
    ("start: NUM\n%import common.NOTHING -> NUM\n", "common.NOTHING"),
    ('start: "\\x41"\n', "not a text"),
]


@pytest.mark.parametrize(("grammar", "why"), REFUSED)
def test_what_is_not_understood_is_refused_by_its_name(grammar: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        escaped(grammar)


def test_a_pattern_matches_the_texts_of_the_grammar() -> None:
    made = pattern_of('start: a ("," a)* [END]\na: "x"i | "0".."9"{2,3} | /[a-c]+?/s ~ 2\nEND: "."\n')
    assert made is not None
    for text, right in (("X", 1), ("x,12", 1), ("123,ab.", 1), ("1", 0), ("a", 0), ("x,", 0), ("1234", 0)):
        assert bool(re.fullmatch(made, text)) is bool(right), text
    assert pattern_of('start: "(" start ")" | "a"\n') is None


def test_a_hostile_grammar_costs_little() -> None:
    doubling = "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40: "aaaaaaaa"\nstart: r0\n'
    chain = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"\n'
    wide = "start: " + "a " * 30_000 + '\na: "x"\n'
    begun = time.process_time()
    with pytest.raises(ValueError, match=str(MAX_BYTES)):
        escaped(doubling)
    for grammar in (chain, wide):
        with contextlib.suppress(ValueError):
            assert escaped(grammar)
    assert time.process_time() - begun < 5
