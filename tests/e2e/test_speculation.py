"""Speculative decoding with a real model on the native backend: bitwise what it says without, in fewer steps where text repeats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, Constraint, SamplingParams
from quire.observe.errors import BadRequest

CODE = "".join(f"    self.field_{name} = field_{name}\n" for name in ("alpha", "beta", "gamma", "delta"))
PROMPTS = [
    "def __init__(self, field_alpha, field_beta, field_gamma, field_delta):\n"
    + CODE
    + "\ndef reset(self):\n"
    + CODE[:40],
    "One two three four five. One two three four five. One two three",
    "The sea was calm that morning, and",
    "Name,Age,City\nAnna,31,Oslo\nBen,28,Oslo\nCara,44,Oslo\n",
]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_p": 0.95, "seed": 11},
    "penalties": {"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "seed": 5},
    "stop strings": {"temperature": 0.0, "stop": ("\n\n", "five. One two", "Oslo\nD")},
}
SETTINGS: dict[str, Any] = {
    "threads": 2,
    "context": 1024,
    "kv_memory": 64 << 20,
    "progress": False,
    "backend": "native",
}


@pytest.fixture(scope="module")
def plain(model_path: Path) -> Iterator[LLM]:
    with LLM(str(model_path), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def guessing(model_path: Path) -> Iterator[LLM]:
    with LLM(str(model_path), **SETTINGS, speculate="ngram", draft_tokens=6) as llm:
        yield llm


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_to_the_bit(kind: str, plain: LLM, guessing: LLM) -> None:
    params = SamplingParams(max_tokens=40, logprobs=2, **KINDS[kind])
    want, have = plain.generate(PROMPTS, params), guessing.generate(PROMPTS, params)
    for a, b in zip(want, have, strict=True):
        assert a.text == b.text and a.outputs[0].tokens == b.outputs[0].tokens
        assert a.outputs[0].finish_reason == b.outputs[0].finish_reason
        assert a.outputs[0].stop_reason == b.outputs[0].stop_reason
        assert a.outputs[0].logprobs == b.outputs[0].logprobs
        assert a.receipt.drafted_tokens == 0
    if kind in ("greedy", "stop strings"):
        assert sum(o.receipt.accepted_tokens for o in have) > 10
        assert sum(o.receipt.steps for o in have) < sum(o.receipt.steps for o in want)
    assert all(o.receipt.accepted_tokens <= o.receipt.drafted_tokens for o in have)


NAMES: dict[str, Any] = {"type": "array", "items": {"enum": ["Anna", "Ben"]}, "minItems": 4, "maxItems": 4}
LIST = {"type": "object", "properties": {"names": NAMES}, "required": ["names"], "additionalProperties": False}
TAGS = {"structures": [{"begin": "<list>", "schema": LIST, "end": "</list>"}], "triggers": ["<"]}
CONSTRAINTS = {
    "schema": Constraint.json_schema(LIST),
    "object": Constraint.json_object(),
    "regex": Constraint.regex("(Anna, |Ben, ){6}Anna"),
    "grammar": Constraint.gbnf('root ::= "[" ("Anna, " | "Ben, "){3,9} "]"'),
    "tags": Constraint.structural_tag(TAGS),
}


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_a_constraint_is_kept_to_and_nothing_is_guessed_past_it(kind: str, plain: LLM, guessing: LLM) -> None:
    """What a constraint allows next depends on every token before: such a sequence is not guessed ahead, and says so."""
    prompt = 'Anna, Ben, Anna, Ben as JSON: {"names": ["Anna", "Ben", '
    free = "One two three four five. One two three four five. One two three"
    for drawn in ({"temperature": 0.0}, {"temperature": 1.1, "seed": 4}):
        params = SamplingParams(max_tokens=32, logprobs=1, **drawn)
        held = [llm.generate([prompt], params, constraint=CONSTRAINTS[kind])[0] for llm in (plain, guessing)]
        want, have = (one.outputs[0] for one in held)
        assert (have.tokens, have.text, have.finish_reason) == (want.tokens, want.text, want.finish_reason)
        assert have.logprobs == want.logprobs
        assert held[1].receipt.enforced == CONSTRAINTS[kind].kind and held[1].receipt.drafted_tokens == 0
    assert guessing.generate([free], SamplingParams(temperature=0.0, max_tokens=20))[0].receipt.drafted_tokens > 0


def test_it_is_told(guessing: LLM, plain: LLM) -> None:
    assert any(line.startswith("speculation: ngram, up to 6 tokens ahead") for line in guessing.info.decisions)
    assert not any(line.startswith("speculation") for line in plain.info.decisions)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"speculate": "oracle"}, "none or ngram"),
        ({"draft_tokens": 0}, "draft_tokens is 0"),
        ({"draft_tokens": 99}, "99"),
    ],
)
def test_what_there_is_not_is_refused(model_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        LLM(str(model_path), **SETTINGS, **options)
