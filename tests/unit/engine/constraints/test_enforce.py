"""Whatever a constrained request says, it was allowed to: from noise, in any batch, at any depth, through preemption."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from quire.engine.constraints import enforce as guides_module
from quire.engine.constraints.enforce import ConstraintMasks
from quire.engine.engine import Engine
from quire.engine.types import Constraint, Request
from quire.observe.errors import BadRequest
from tests.effort import at_most
from tests.unit.engine.constraints.guide_kit import EOS, SPECIAL, TOKENS, WORDS, V, ask, make, run, text_of

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"type": "array", "items": {"enum": ["foo", 1, None, True]}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "boolean"}, {"const": {"a": [1, "b"]}}, {"type": "number", "minimum": 2, "maximum": 3}]},
    {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}}, "$ref": "#/$defs/n"},
    {"type": "string", "pattern": "^[a-c]{2,5}$"},
    {"type": "string", "format": "date"},
    {
        "type": "object",
        "patternProperties": {"^a": {"type": "null"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    {"type": "integer", "multipleOf": 5, "exclusiveMinimum": 0, "exclusiveMaximum": 1000},
    {"allOf": [{"properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]}, {"type": "object"}]},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 2},
]
PATTERNS = [
    r"[0-9]{3}-[0-9]{2}",
    r"(foo|bar)+(baz)?",
    r"\d+(\.\d{1,3})?",
    r"[^a-z]{1,4}",
    r"a.{0,4}b",
    "é+|日本",
    r"\{\"x\": \d\}",
]
CHOICES = ["yes", "no", "maybe", "a/b", 'q"\\\n', "日本"]
ENGINES = [(0, 256), (1, 256), (0, 42), (1, 42)]


def finished(outcome: dict[str, Any]) -> list[str]:
    """Texts that ended by themselves; the others must have been cut, and must say so."""
    texts = []
    for tokens, last in outcome.values():
        assert last.finish in ("stop", "length"), last.error
        if last.finish == "stop":
            assert tokens[-1] in EOS
            texts.append(text_of(tokens))
        else:
            assert len(tokens) == 120
            text_of(tokens)
    return texts


@pytest.mark.parametrize(("depth", "pages"), ENGINES)
def test_whatever_ends_satisfies_its_schema(depth: int, pages: int) -> None:
    ended = preempted = 0
    engine = make(depth=depth, pages=pages, context=200)
    requests = [ask(Constraint.json_schema(s), seed=i, prompt=range(1, 30)) for s in SCHEMAS for i in range(4)]
    free = [ask(None, seed=i, prompt=range(1, 30)) for i in range(4)]
    outcome = run(engine, [*requests, *free])
    for request in free:
        assert outcome.pop(request.id)[1].receipt.enforced == ""
    for request in requests:
        tokens, last = outcome[request.id]
        preempted += last.receipt.preemptions
        assert last.receipt.enforced == "json_schema"
        for text in finished({request.id: (tokens, last)}):
            assert request.constraint is not None
            jsonschema.validate(json.loads(text), json.loads(request.constraint.text))
            ended += 1
    assert ended > len(requests) // 2
    assert (preempted > 0) == (pages < 100)
    engine.close()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_whatever_ends_matches_its_pattern(pattern: str) -> None:
    texts = finished(run(make(), [ask(Constraint.regex(pattern), seed=i) for i in range(12)]))
    assert texts and all(re.fullmatch(pattern, text) for text in texts)


def test_a_choice_is_one_of_them_and_each_can_be() -> None:
    texts = finished(run(make(), [ask(Constraint.choice(CHOICES), seed=i) for i in range(120)]))
    assert len(texts) == 120
    assert set(texts) == set(CHOICES)


def test_grammars_of_both_kinds() -> None:
    lark, gbnf = 'start: "(" start ")" | /[0-9]+/', 'root ::= "(" root ")" | [0-9]+'
    for constraint in (Constraint.lark(lark), Constraint.gbnf(gbnf)):
        texts = finished(run(make(), [ask(constraint, seed=i) for i in range(20)]))
        assert texts
        for text in texts:
            inner = text.strip("()")
            assert inner.isdigit() and text == "(" * text.count("(") + inner + ")" * text.count("(")


def test_any_object_is_a_json_object() -> None:
    texts = finished(run(make(), [ask(Constraint.json_object(), seed=i) for i in range(30)]))
    assert texts and all(isinstance(json.loads(text), dict) for text in texts)


def test_tokens_are_the_same_at_any_depth_in_any_batch_and_through_preemption() -> None:
    def all_of(depth: int, pages: int, together: bool) -> list[list[int]]:
        requests = [ask(Constraint.json_schema(s), seed=i, prompt=range(1, 30)) for i, s in enumerate(SCHEMAS)]
        engines = [make(depth=depth, pages=pages, context=200)] if together else []
        if together:
            outcome = run(engines[0], requests)
        else:
            outcome = {}
            for request in requests:
                outcome |= run(make(depth=depth, pages=pages, context=200), [request])
        return [outcome[r.id][0] for r in requests]

    alone = all_of(0, 256, together=False)
    for depth, pages in ENGINES:
        assert all_of(depth, pages, together=True) == alone


def test_tokens_that_are_no_text_satisfy_nothing() -> None:
    """Not control tokens, not tokens without bytes, not rows of logits without a token."""
    masks = ConstraintMasks(V)
    masks.set_vocabulary(WORDS)
    engine = make()
    outcome = run(engine, [ask(Constraint.regex(r"(?s:.)*"), seed=i, max_tokens=40) for i in range(20)])
    for tokens, _ in outcome.values():
        text_of(tokens)
    assert any(set(tokens) & set(EOS) for tokens, _ in outcome.values())


def test_the_end_comes_exactly_where_the_grammar_accepts() -> None:
    """A token that ends an answer is no text, even for a grammar that names it."""
    end = TOKENS[EOS[0]].decode()
    outcome = run(make(), [ask(Constraint.lark(f'start: "a" <{end.strip("<>")}> "b"'))])
    ((tokens, last),) = outcome.values()
    assert last.finish == "error" and last.error and "allows nothing" in last.error and last.param == "constraint"
    assert text_of(tokens) == "a"


def test_greedy_and_penalties_keep_to_it_too() -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.8, "presence_penalty": 2.0},
        {"top_k": 1},
        {"top_p": 0.1, "min_p": 0.2},
        {"typical_p": 0.3},
        {"logit_bias": {SPECIAL[0]: 100.0, V - 1: 100.0}},
        {"temperature": 0.0, "logprobs": 2},
    ]
    for one in asked:
        for text in finished(run(make(), [ask(Constraint.json_schema(PERSON), **one)])):
            jsonschema.validate(json.loads(text), PERSON)


def test_a_cut_answer_says_length() -> None:
    ((tokens, last),) = run(make(), [ask(Constraint.regex("[a-z]{50}"), max_tokens=5)]).values()
    assert (last.finish, len(tokens)) == ("length", 5)
    assert re.fullmatch("[a-z]+", text_of(tokens))


def test_a_stop_token_ends_it_early() -> None:
    """Who asks for one gets it: the answer is a beginning of what the constraint allows."""
    a = TOKENS.index(b"a")
    ((tokens, last),) = run(make(), [ask(Constraint.regex("ba{3}c"), stop_token_ids=(a,))]).values()
    assert last.finish == "stop" and last.stop_id == a and text_of(tokens) in ("ba", "baa", "baaa")


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (Constraint.json_schema({"not": {"type": "string"}}), "keyword not cannot"),
        (
            Constraint.json_schema({"type": "array", "uniqueItems": True, "contains": {}}),
            "keywords contains, uniqueItems",
        ),
        (Constraint.json_schema({"properties": {"a": {"if": {}, "then": {}}}}), "keywords if, then"),
        (Constraint.json_schema({"oneOf": [{"type": "string"}, {"minLength": 2}]}), "oneOf"),
        (Constraint.json_schema({"type": "string", "format": "frob"}), "frob"),
        (Constraint.json_schema({"$ref": "http://127.0.0.1:1/x"}), "http://127.0.0.1:1/x"),
        (Constraint.json_schema({"not": {}, "x-guidance": {"lenient": True}}), "x-guidance"),
        (Constraint.json_schema("{"), "not JSON"),
        (Constraint.json_schema("[]"), "must be a JSON object"),
        (Constraint.json_schema('{"maximum": NaN}'), "NaN"),
        (Constraint.json_schema("false"), "no text satisfies"),
        (Constraint.json_schema({"$ref": "#"}), "no text satisfies"),
        (Constraint.json_schema({"enum": []}), "anyOf is empty"),
        (Constraint.json_schema({"type": "frob"}), "frob"),
        (Constraint.json_schema({"minProperties": 2}), "minProperties"),
        (Constraint.json_schema({"const": "a\x01b"}), "control character"),
        (Constraint.json_schema({"properties": {"a\x00": {}}}), "control character"),
        (Constraint.json_schema({"type": "string", "pattern": "^a\\x01b$"}), "control character"),
        (Constraint.json_schema({"patternProperties": {"\\u0007": {}}}), "control character"),
        (Constraint.regex("(?=a)b"), "look-around"),
        (Constraint.regex("["), "unclosed"),
        (Constraint.regex(r"(a)\1"), "backreferences"),
        (Constraint.regex(""), "empty"),
        (Constraint.regex("a" * 20000), "20000 bytes"),
        (Constraint.choice([]), "list of strings"),
        (Constraint.choice(["a", ""]), "empty"),
        (Constraint.choice([str(i) for i in range(5000)]), "5000 choices"),
        (Constraint.gbnf("root ::= ("), "GBNF"),
        (Constraint.lark("start: frob"), "frob"),
        (Constraint.lark("start: x\nx[temperature=0.5]: /a/"), "temperature"),
        (Constraint.lark('start: %json {"x-guidance": {"lenient": true}, "not": {}}'), "x-guidance"),
        (Constraint(kind="xml"), "no constraint of kind 'xml'"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.kind,
)
def test_what_cannot_be_enforced_is_refused_by_name(constraint: Constraint, said: str) -> None:
    engine = make()
    asked = Constraint(kind=constraint.kind, text=constraint.text, param="response_format")
    ((tokens, last),) = run(engine, [ask(asked)]).values()
    assert (tokens, last.finish, last.param) == ([], "error", "response_format")
    assert last.error and said in last.error and "\n" not in last.error
    assert finished(run(engine, [ask(Constraint.choice(["yes"]))])) == ["yes"]


def test_what_contradicts_it_is_refused() -> None:
    yes = Constraint.choice(["yes"])
    for one, param in (({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 3}, "min_tokens")):
        ((_, last),) = run(make(), [ask(yes, **one)]).values()
        assert (last.finish, last.param) == ("error", param)
    engine = make()
    bare = Request(id="bare", tokens=[1], constraint=yes)
    assert "no token that ends" in str(run(engine, [bare])["bare"][1].error)
    other = Request(id="other", tokens=[1], constraint=yes, eos_ids=(5,))
    assert "end tokens" in str(run(engine, [other])["other"][1].error)


def test_an_engine_that_was_told_nothing_refuses() -> None:
    engine = make()
    fresh = ConstraintMasks(V)
    engine._masks = fresh
    ((_, last),) = run(engine, [ask(Constraint.choice(["a"]))]).values()
    assert last.finish == "error" and "never told" in str(last.error)


HOSTILE = {
    "deep": Constraint.json_schema('{"items":' * 400 + "{}" + "}" * 400),
    "very deep": Constraint.json_schema('{"items":' * 50000 + "{}" + "}" * 50000),
    "enum": Constraint.json_schema({"enum": [f"value number {i}" for i in range(30000)]}),
    "properties": Constraint.json_schema({"properties": {f"p{i}": {"type": "string"} for i in range(1000)}}),
    "product": Constraint.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {"type": "string"}}} for j in range(4)]} for i in range(12)]}
    ),
    "long": Constraint.json_schema({"type": "string", "minLength": 10**6, "maxLength": 10**9}),
    "many": Constraint.json_schema({"type": "array", "minItems": 10**6, "maxItems": 10**9}),
    "nested plus": Constraint.regex("((a+)+)+$"),
    "subsets": Constraint.regex("(.*a){30}" + "." * 30),
    "counted": Constraint.regex("(x{1,1000}){1,1000}"),
    "suffixes": Constraint.regex(".*(a|b){200}.*c|(.*x){20}.*y(.*z){30}"),
    "doubled terminals": Constraint.lark(
        "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(400)) + '\nA400: "a"'
    ),
    "doubled rules": Constraint.gbnf(
        "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(400)) + '\na400 ::= "a"'
    ),
    "a chain of lists": Constraint.json_schema(
        {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(3000)}
            | {"d3000": {"type": "null"}},
        }
    ),
    "a chain of rules": Constraint.lark(
        "start: r0\n" + "\n".join(f'r{i}: r{i + 1} "x" | "y"' for i in range(3000)) + '\nr3000: "z"'
    ),
    "a ring of rules": Constraint.gbnf(
        "root ::= r0\n" + "\n".join(f'r{i} ::= r{(i + 1) % 1500} "x" | r{i * 7 % 1500} | "y"' for i in range(1500))
    ),
    "a large pattern in a tag": Constraint.structural_tag(
        {"format": {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "a?" * 20000}, "end": ">"}}
    ),
    "terminals in a circle": Constraint.lark('start: A\nA: B "a"\nB: A "b"'),
    "left": Constraint.lark("start: start start | start"),
    "parens": Constraint.gbnf("root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_refused_or_bounded(name: str) -> None:
    """A step never takes long, and a harmless request beside them is answered."""
    engine = make()
    hostile, harmless = ask(HOSTILE[name], max_tokens=30), ask(Constraint.choice(["yes"]))
    with at_most(10.0):
        outcome = run(engine, [hostile, harmless])
    assert finished({harmless.id: outcome[harmless.id]}) == ["yes"]
    assert outcome[hostile.id][1].finish in ("stop", "length", "error")


def test_compiled_constraints_are_kept_by_content_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    real = guides_module.compile_matcher

    def counting(constraint: Constraint, tokenizer: Any) -> Any:
        compiled.append(constraint.text)
        return real(constraint, tokenizer)

    monkeypatch.setattr(guides_module, "compile_matcher", counting)
    monkeypatch.setattr(guides_module, "ENTRIES", 3)
    engine = make()
    same = [Constraint(kind="regex", text="a{3}", param=name) for name in ("x", "y", "z")]
    finished(run(engine, [ask(c) for c in same]))
    finished(run(engine, [ask(same[0])]))
    assert compiled == ["a{3}"]
    for i in range(5):
        finished(run(engine, [ask(Constraint.regex(f"b{{{i + 1}}}"))]))
    masks: Any = engine._masks
    assert [text for _, text, _ in masks._kept] == ["b{3}", "b{4}", "b{5}"]
    assert masks._kept_bytes == 12
    monkeypatch.setattr(guides_module, "TEXT_BYTES", 10)
    finished(run(engine, [ask(Constraint.regex("c{1}"))]))
    assert masks._kept_bytes <= 10
    assert not masks._made and not masks._jobs


def test_blanks_are_part_of_what_is_kept() -> None:
    """The same schema with other blanks is another constraint."""
    engine = make()
    schema = '{"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}'
    texts = []
    for blanks in (" {2}", ""):
        constraint = Constraint(kind="json_schema", text=schema, blanks=blanks)
        ((tokens, last),) = run(engine, [ask(constraint)]).values()
        assert last.finish == "stop"
        texts.append(text_of(tokens))
    assert "  " in texts[0] and texts[1] == "[1,1,1]"


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, the compiler is not done with constraints that begin with "slow"."""
    real, free = guides_module.compile_matcher, threading.Event()

    def compiled(constraint: Constraint, tokenizer: Any) -> Any:
        if constraint.text.startswith("slow"):
            free.wait()
        return real(constraint, tokenizer)

    monkeypatch.setattr(guides_module, "compile_matcher", compiled)
    yield free
    free.set()


def test_others_run_while_one_is_compiled_and_it_can_be_let_go(free: threading.Event) -> None:
    engine = make()
    held, other = ask(Constraint.regex("slow")), ask(None, max_tokens=3)
    engine.add(held)
    engine.add(other)
    done = []
    while len(done) < 1:
        done += [e for e in engine.step() if e.finish]
    assert done[0].id == other.id
    assert engine.busy
    engine.abort(held.id)
    (last,) = [e for e in engine.step() if e.finish]
    assert (last.id, last.finish) == (held.id, "abort")
    free.set()
    assert finished(run(engine, [ask(Constraint.regex("slow"))])) == ["slow"]


@pytest.mark.parametrize("failures", [1, 2])
def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    """Where a deep stack cannot be had a smaller one is tried; then the request is told, and nothing hangs."""
    left = [failures]
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "quire-grammar" and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    before = threading.stack_size()
    engine = make()
    ((tokens, last),) = run(engine, [ask(Constraint.choice(["yes"]))]).values()
    assert threading.stack_size() == before
    if failures == 1:
        assert text_of(tokens) == "yes"
    else:
        assert last.finish == "error" and "no memory" in str(last.error)
        assert finished(run(engine, [ask(Constraint.choice(["yes"]))])) == ["yes"]


def test_a_deadline_holds_while_it_is_compiled(free: threading.Event) -> None:
    engine = make()
    request = Request(id="d", tokens=[1], eos_ids=EOS, constraint=Constraint.regex("slow"), deadline=time.time() + 0.1)
    ((_, last),) = run(engine, [request]).values()
    assert last.finish == "abort" and last.error == "deadline passed"


def test_what_takes_too_long_is_given_up_and_does_not_lock_others_out(
    free: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guides_module, "SECONDS", 0.1)
    engine = make()
    slow = [ask(Constraint.regex(f"slow{i}")) for i in range(8)]
    outcome = run(engine, slow)
    errors = [str(last.error) for _, last in outcome.values()]
    assert all("too long" in e or "to compile" in e for e in errors) and len(errors) == 8
    masks: Any = engine._masks
    assert 4 <= masks._overdue <= 5  # two are compiled at a time
    monkeypatch.setattr(guides_module, "SECONDS", 60.0)
    free.set()  # they end at last
    for thread in threading.enumerate():
        if thread.name == "quire-grammar":
            thread.join(30)
    assert finished(run(engine, [ask(Constraint.choice(["fine"]))])) == ["fine"]
    assert masks._overdue == 0


def test_a_fault_in_a_mask_fails_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    bad, good = ask(Constraint.regex("[a-z]{20}")), ask(Constraint.regex("[a-z]{20}"), prompt=(9, 9))
    engine.add(bad)
    engine.add(good)
    tokens: dict[str, list[int]] = {bad.id: [], good.id: []}
    ends: dict[str, Any] = {}
    while engine.busy:
        for event in engine.step():
            tokens[event.id] += event.tokens
            if event.finish:
                ends[event.id] = event
        masks: Any = engine._masks
        for state in masks._states.values():
            if state.seq.request.id == bad.id and state.taken == 3:
                state.matcher = object()
    assert ends[bad.id].finish == "error" and "could not be enforced" in ends[bad.id].error
    assert ends[bad.id].param is None  # a fault of ours
    assert ends[good.id].finish == "stop" and re.fullmatch("[a-z]{20}", text_of(tokens[good.id]))


def test_a_constrained_sequence_has_one_step_in_flight_and_free_ones_go_on() -> None:
    engine = make(depth=1)
    both = run(engine, [ask(Constraint.regex("[a-z]{30}")), ask(None, max_tokens=60, ignore_eos=True)])
    (a, _), (b, end_b) = both.values()
    assert re.fullmatch("[a-z]{30}", text_of(a)) and len(b) == 60
    assert end_b.receipt.steps <= 62
    assert isinstance(engine, Engine)


def test_masks_are_as_wide_as_the_logits() -> None:
    engine = make()
    masks: Any = engine._masks
    seen = []
    real = masks.masks

    def spy(plan: Any) -> Any:
        masks, lost = real(plan)
        seen.extend((masks or {}).values())
        return masks, lost

    masks.masks = spy
    finished(run(engine, [ask(Constraint.choice(["yes", "no"]))]))
    assert seen and all(mask.shape == (V,) and mask.dtype == np.bool_ for mask in seen)
    assert not any(mask[len(TOKENS) - 1 :].any() or mask[SPECIAL[0]] for mask in seen)
    assert seen[-1][list(EOS)].all() and not seen[0][list(EOS)].any()


def test_bad_input_raises_before_it_is_held() -> None:
    masks = ConstraintMasks(V)
    masks.set_vocabulary(WORDS)
    with pytest.raises(BadRequest):
        masks.hold(ask(Constraint(kind="frob")))
    assert not masks.holding
