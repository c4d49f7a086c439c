"""Numbers that every program can read: few digits in a row and a small exponent, wherever a schema leaves the choice."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest

from quire.engine.constraints.numbers import DIGITS, Digits, NumberWatch
from quire.engine.types import Constraint
from tests.unit.engine.constraints.guide_kit import EOS, TOKENS, WORDS, V, ask, make, run, text_of

TABLE = Digits(WORDS, V)
ALL = np.ones(V, np.bool_)


def after(text: str) -> NumberWatch:
    watch = NumberWatch(TABLE)
    watch.take(list(text.encode()))
    return watch


def allowed(text: str, token: bytes) -> bool:
    return bool(after(text).narrow(ALL)[TOKENS.index(token)])


@pytest.mark.parametrize(
    ("text", "digit"),
    [
        ("1" * (DIGITS - 2), True),
        ("1" * DIGITS, False),
        ('{"a":-' + "1" * DIGITS, False),
        ("0." + "3" * (DIGITS - 2), True),
        ("0." + "3" * DIGITS, False),
        ("1e1", False),  # 10 is a token of two digits; a single one is seen below
        ("1e-12", False),
        ('"' + "1" * 100, True),
        ('"\\"' + "1" * 100, True),
        ('{"' + "1" * 100 + '":5', True),
        ("[true", True),
        ("[" + "1, " * 50, True),
    ],
)
def test_digits_end(text: str, digit: bool) -> None:
    assert allowed(text, b"10") is digit
    assert allowed(text, b"}") and allowed(text, b'"')


def test_one_more_digit_of_an_exponent() -> None:
    assert allowed("1e1", b"2") and not allowed("1e12", b"2") and allowed("1e12", b"}")


def test_where_there_is_nothing_but_digits_they_are_written() -> None:
    only = np.zeros(V, np.bool_)
    only[TOKENS.index(b"7")] = True
    assert after("1" * 100).narrow(only)[TOKENS.index(b"7")]


def test_whatever_ends_can_be_read() -> None:
    """An engine that likes digits, on a schema that says no more than that there is a number."""
    rng = random.Random(1)
    engine = make()
    schemas = [
        {"type": "number"},
        {"type": "integer"},
        {},
        {"type": "array", "items": {"type": "number"}, "maxItems": 2},
    ]
    digits = [i for i, t in enumerate(TOKENS) if t and t in b"0123456789eE."]
    like = dict.fromkeys(digits, 60.0) | dict.fromkeys(EOS, -60.0)
    requests = [
        ask(Constraint.json_schema(schema), seed=rng.randrange(1000), logit_bias=like, max_tokens=100)
        for schema in schemas
        for _ in range(4)
    ]
    ended = 0
    for tokens, last in run(engine, requests).values():
        text = text_of(tokens)
        assert all(len(d) <= DIGITS + 1 for d in re.findall(r"[0-9]+", text)), text
        if last.finish == "stop":
            ended += 1
            assert "inf" not in repr(json.loads(text))
    assert ended >= len(requests) // 2
