"""GBNF to the letter: every short text is allowed exactly where Python's own patterns, or a grammar's meaning, allow it."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from quire.engine.constraints.gbnf import to_lark
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest
from tests.unit.engine.walks import admits, compiled, walk

# (grammar, pattern, letters): all texts of up to three to five letters are compared
SAME = [
    ('root ::= "ab" | "a" "c"*', "ab|ac*", "abc"),
    ('root ::= "a" "bc" | "ab" "d"', "abc|abd", "abcd"),
    ('root ::= "a" "bc" | "ab" "d" | w\nw ::= "d" "d"', "abc|abd|dd", "abcd"),
    ('root ::= w "bc" | "ab" "d"\nw ::= "a"', "abc|abd", "abcd"),
    ('root ::= w "c" | v "d"\nw ::= "a"+\nv ::= "a" "a"', "a+c|aad", "acd"),
    ('root ::= [ab] "b" | "ab" "c" | w\nw ::= "c"', "[ab]b|abc|c", "abc"),
    ('root ::= ws "\\n" ws\nws ::= [ \\n]*', "[ \n]*\n[ \n]*", " \na"),
    ('root ::= word "a"\nword ::= [ab]+', "[ab]+a", "abc"),
    ('root ::= word "c"\nword ::= [ab]+', "[ab]+c", "abc"),
    ('root ::= (x | y)+\nx ::= "a" "b"?\ny ::= "b" "a"?', "(?:ab?|ba?)+", "ab"),
    ('root ::= n ("," n)*\nn ::= "0" | [1-2] [0-2]{0,2}', "(?:0|[12][0-2]{0,2})(?:,(?:0|[12][0-2]{0,2}))*", "012,"),
    ('root ::= "a"{2} | "b"{1,3} | "c"{2,}', "a{2}|b{1,3}|c{2,}", "abc"),
    ('root ::= [^a] . "-"?', "[^a](?s:.)-?", "ab-\n"),
    ("root ::= [a\\-b] [\\]x]", r"[ab-][\]x]", "a-]"),
    ('root ::= ("a" |\n  # nothing\n  "b")\n  | "c"', "a|b|c", "abc"),
    ('root ::= "" | "a"', "|a", "ab"),
    ('root ::= x y\nx ::= "a"*\ny ::= "a"?', "a*", "ab"),
    ('root ::= a-b a_b\na-b ::= "x"\na_b ::= "y"', "xy", "xy"),
    ('root ::= "\\x61\\u0062\\U00000063"', "abc", "abc"),
    ('root ::= "é" [à-ü]', "é[à-ü]", "éaü"),
]


@pytest.mark.parametrize(("grammar", "pattern", "letters"), SAME)
def test_the_same_texts(grammar: str, pattern: str, letters: str) -> None:
    matcher = compiled(Constraint.gbnf(grammar))
    for n in range({2: 6, 3: 5}.get(len(letters), 4)):
        for text in map("".join, itertools.product(letters, repeat=n)):
            assert admits(matcher, text) == bool(re.fullmatch(pattern, text)), (text, to_lark(grammar))


def test_the_converter_of_llguidance_is_not_exact() -> None:
    """The reason why there is one of our own. If this fails, theirs reads this grammar now: compare the two on SAME again."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    grammar = 'root ::= "a" "bc" | "ab" "d"'
    theirs = compiled(Constraint.lark(gbnf_to_lark(grammar)))
    ours = compiled(Constraint.gbnf(grammar))
    assert admits(theirs, "abd") and not admits(theirs, "abc")
    assert admits(ours, "abd") and admits(ours, "abc")


JSON = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = 'root ::= (sum "=" ws term "\\n")+\nsum ::= term ([-+*/] term)*\nterm ::= [a-z]+ ws | [0-9]+ ws | "(" ws sum ")" ws\n'


def test_json_in_words_and_sums_by_character() -> None:
    """Words where that is exact, since it is faster; characters where it is not."""
    assert "W" in to_lark(JSON)
    assert '"left, "' in to_lark('root ::= ("left, " | "right, ")*')
    sums = SUMS + "ws ::= [ \\t\\n]*"
    assert "W" not in to_lark(sums) and "W" in to_lark(SUMS + 'ws ::= " "*')
    matcher = compiled(Constraint.gbnf(sums))
    assert admits(matcher, "a+(1 -b) = 2\n") and admits(matcher, "1=1\n\n2=2\n\n") and not admits(matcher, "1=1")
    rng = random.Random(2)
    matcher = compiled(Constraint.gbnf(JSON))
    ended = [text for text in (walk(matcher, rng) for _ in range(60)) if text is not None]
    assert len(ended) > 20
    for text in ended:
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("", "no rules"),
        ('foo ::= "a"', "no rule root"),
        ("root ::= foo", "rule foo"),
        ('root ::= "a', '" is missing'),
        ('root ::= ("a"', ") is missing"),
        ("root ::= [b-a]", "no range"),
        ("root ::= []", "matches nothing"),
        ("root ::= [a", "too soon"),
        ('root ::= "\\q"', "is not known"),
        ('root ::= "\\x6"', "hexadecimal"),
        ('root ::= "a"{2,1}', "before it begins"),
        ('root ::= "a"{x}', "a count"),
        ('root = "a"', "::= is missing"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ('root ::= "a" )', "line 1"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "deep"),
    ],
)
def test_what_is_no_grammar_is_told(grammar: str, said: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(said)):
        compiled(Constraint.gbnf(grammar))
