"""Constraints as llguidance's grammars: what may be asked, what is refused, and how one is compiled. No state, no threads.

Owns the bounds on a constraint's text and the words of every refusal. A schema is enforced as it is written or refused by
the name of the keyword that cannot be: nothing is approximated, and a schema cannot ask for that either. Grammars rule tokens
out and force none, so the model writes its own tokens. llguidance is imported when the first constraint comes, never before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from quire.engine.constraints.escaped import escaped
from quire.engine.constraints.gbnf import to_lark
from quire.engine.constraints.schemas import OWN_OPTIONS, prepared
from quire.engine.constraints.tags import written
from quire.engine.types import Constraint, Vocabulary
from quire.observe.errors import BadRequest, Unsupported
from quire.runner.params import SamplingParams

JSON_OBJECT, JSON_SCHEMA, REGEX, CHOICE, LARK, GBNF = "json_object", "json_schema", "regex", "choice", "lark", "gbnf"
STRUCTURAL_TAG = "structural_tag"  # see tags.py
ESCAPED_LARK = "escaped_lark"  # what stands inside a JSON string whose text the Lark grammar describes: see escaped.py
COMPOSED = (
    "composed"  # a grammar of ours with others inside: {"grammar": …, "parts": {name: {kind, text, param, blanks}}}
)
MAX_TEXT = {
    JSON_SCHEMA: 1 << 20,
    REGEX: 1 << 14,
    CHOICE: 1 << 18,
    LARK: 1 << 16,
    ESCAPED_LARK: 1 << 16,
    GBNF: 1 << 16,
    STRUCTURAL_TAG: 1 << 20,
    COMPOSED: 2 << 20,
}  # bytes
_HOLDERS = (COMPOSED, STRUCTURAL_TAG)
MAX_CHOICES = 4096
MAX_WRITTEN_OUT = 200_000
MAX_STATES = 50_000  # of one sequence's lexer, which grows as it runs: one or two kilobytes each

DIRECTIVE = '\n%llguidance {"no_forcing": true}\n'


def enforceable(constraint: Constraint) -> bool:
    """Whether a constraint can be compiled, whatever the vocabulary."""
    from llguidance import LLMatcher

    try:
        failed, complaints = LLMatcher.validate_grammar_with_warnings(to_grammar(constraint))
    except BadRequest:
        return False
    return not failed and not complaints


class Matcher(Protocol):
    """llguidance's LLMatcher, as far as it is used here."""

    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...
    def get_grammar_warnings(self) -> list[str]: ...
    def deep_copy(self) -> Matcher: ...
    def is_accepting(self) -> bool: ...
    def is_stopped(self) -> bool: ...
    def consume_tokens(self, sampled_tokens: list[int]) -> bool: ...
    def compute_bitmask(self) -> bytes: ...


def check(constraint: Constraint, sampling: SamplingParams, eos_ids: Iterable[int]) -> None:
    """Refuse what could not be honoured together. Cheap: the text itself is looked at when it is compiled."""
    name, kind = constraint.param, constraint.kind
    if kind != JSON_OBJECT and kind not in MAX_TEXT:
        known = ", ".join((JSON_OBJECT, *MAX_TEXT))
        raise BadRequest(f"{name}: there is no constraint of kind {kind!r}", cure=f"there are {known}", param=name)
    _check_size(constraint)
    if sampling.ignore_eos:
        raise BadRequest(f"ignore_eos and {name} contradict each other: a text that is whole ends", param="ignore_eos")
    if sampling.min_tokens:
        raise BadRequest(
            f"min_tokens and {name} may contradict each other: the answer is as long as it must be",
            param="min_tokens",
            cure="leave min_tokens out",
        )
    if not tuple(eos_ids):
        raise Unsupported(f"{name}: this model has no token that ends an answer, so nothing could end a whole one")


def _check_size(constraint: Constraint) -> None:
    kind, name = constraint.kind, constraint.param
    size = len(constraint.text.encode("utf-8", "replace"))
    if kind in MAX_TEXT and size > MAX_TEXT[kind]:
        raise BadRequest(f"{name} has {size} bytes: a {kind} may have {MAX_TEXT[kind]}", param=name)


def to_grammar(constraint: Constraint) -> str:
    """The constraint in llguidance's own words. Raises BadRequest; takes time in proportion to the text."""
    from llguidance import LLMatcher

    if constraint.kind in _HOLDERS:
        named = [{"name": name, "lark_grammar": text + DIRECTIVE} for name, text in _named(constraint, "main")]
        return json.dumps({"grammars": named})
    return LLMatcher.grammar_from_lark(_written(constraint) + DIRECTIVE)


def composed(constraint: Constraint, prefix: str = "s") -> tuple[str, dict[str, Constraint]]:
    """The grammar and the parts of a constraint that holds others."""
    try:
        if constraint.kind == STRUCTURAL_TAG:
            return written(constraint, prefix)
        whole = json.loads(constraint.text)
        parts = {name: Constraint(**part) for name, part in whole["parts"].items()}
        if any(part.kind not in _WRITERS and part.kind != STRUCTURAL_TAG for part in parts.values()):
            raise ValueError("a part has no such kind")
        return whole["grammar"], parts
    except BadRequest as error:
        raise BadRequest(f"{constraint.param}: {error.message}", cure=error.cure, param=constraint.param) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadRequest(f"{constraint.param}: {error}"[:500], param=constraint.param) from None


def _named(constraint: Constraint, name: str) -> Iterator[tuple[str, str]]:
    """Every grammar of a constraint, under the name by which the others know it."""
    if constraint.kind not in _HOLDERS:
        _check_size(constraint)
        yield name, _written(constraint)
        return
    grammar, parts = composed(constraint, f"{name}_")
    yield name, grammar
    for inner, part in parts.items():
        yield from _named(part, inner)


def _written(constraint: Constraint) -> str:
    try:
        return _WRITERS[constraint.kind](constraint)
    except BadRequest as error:
        raise BadRequest(f"{constraint.param}: {error.message}", cure=error.cure, param=constraint.param) from None
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadRequest(f"{constraint.param}: {why}"[:500], param=constraint.param) from None


def compile_matcher(constraint: Constraint, tokenizer: Any) -> Matcher:
    """A matcher at the beginning of an answer. `tokenizer` is what `tokenizer_of` made. Raises BadRequest."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
    made = LLMatcher(tokenizer, to_grammar(constraint), log_level=0, limits=limits)
    if not made.is_error():
        trial = made.deep_copy()
        trial.compute_bitmask()
        if not trial.is_error() and trial.is_stopped() and not trial.is_accepting():
            raise _refusal(constraint, "no text satisfies it")
        if trial.is_error():
            raise _refusal(constraint, trial.get_error())
        if warnings := made.get_grammar_warnings():
            raise _refusal(constraint, "; ".join(warnings))
        return made
    if constraint.kind in _HOLDERS:  # say which part it is
        for part in composed(constraint)[1].values():
            compile_matcher(part, tokenizer)
    raise _refusal(constraint, made.get_error())


def tokenizer_of(vocabulary: Vocabulary, width: int) -> Any:
    """llguidance's view of a vocabulary. `width` is how many tokens the model chooses among."""
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = vocabulary.tokens[:width]
    tokens += [b""] * (width - len(tokens))  # rows of logits that no token stands behind
    special = {i for i in vocabulary.special if i < width} | {i for i, data in enumerate(tokens) if not data}
    for i in special:
        tokens[i] = tokens[i] or b"<token %d>" % i
    ends = [i for i in vocabulary.eos_ids if i < width]
    return LLTokenizer(TokenizerWrapper(_Words(tokens, sorted(special), ends[0])), n_vocab=width, eos_token=ends)


class _Words:
    """What llguidance asks of a tokenizer. Nothing is forced, so it never has to tokenize."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos: int):
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos

    def __call__(self, text: bytes | str) -> list[int]:
        return []


# ---- from what was asked to Lark


def _json_schema(asked: Constraint) -> str:
    return "start: %json " + prepared(asked.text, asked.blanks) + "\n"


def _json_object(asked: Constraint) -> str:
    return "start: %json " + prepared('{"type": "object"}', asked.blanks) + "\n"


def _regex(asked: Constraint) -> str:
    text = asked.text
    from llguidance import regex_to_lark

    if not text:
        raise ValueError("the pattern is empty")
    return f"start: /{regex_to_lark(text, '')}/\n"


def _choice(asked: Constraint) -> str:
    choices = json.loads(asked.text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("a choice is a list of strings, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"{len(choices)} choices: at most {MAX_CHOICES}")
    return "start: " + " | ".join(json.dumps(c) for c in dict.fromkeys(choices)) + "\n"


def _lark(asked: Constraint) -> str:
    text = asked.text
    if OWN_OPTIONS in text:
        raise ValueError(f"the keyword {OWN_OPTIONS} is not taken: how a schema is enforced is not the schema's to say")
    if _TEMPERATURE.search(text):
        raise ValueError("a rule's temperature cannot be honoured: send one for the request")
    _check_terminals(text)
    return text


def _escaped_lark(asked: Constraint) -> str:
    made = escaped(_lark(asked))
    _check_terminals(made)
    return made


def _check_terminals(text: str) -> None:
    """Terminals are written out wherever they are named: two names in each of thirty are a billion."""
    bodies: dict[str, list[str]] = {}
    at = ""
    for word in _LARK_WORD.finditer(text):
        if word["rule"]:
            at = word["rule"]
            bodies[at] = []
        elif word["name"] and at:
            bodies[at].append(word["name"])
    sizes: dict[str, int] = {}
    left = list(bodies)
    while left:  # without recursion: chains of names are long
        name = left[-1]
        named = [n for n in bodies[name] if n in bodies and n != name] if name.upper() == name else []
        waiting = [n for n in named if n not in sizes]
        if name in sizes or not waiting:
            sizes.setdefault(name, 1 + sum(sizes[n] for n in named))
            left.pop()
        elif len(left) > len(bodies) + len(set(left)):
            raise ValueError("its terminals name each other in a circle")
        else:
            left += waiting[:1]
        if sizes.get(name, 0) > MAX_WRITTEN_OUT:
            raise ValueError(f"the terminal {name}, written out, has more than {MAX_WRITTEN_OUT} parts")


_LARK_WORD = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*|#[^\n]*'  # texts, patterns and comments, which name nothing
    r"|^[ \t]*[?!]?(?P<rule>[A-Za-z_][\w-]*)(?:\[[^\]\n]*\])?(?:\.-?\d+)?[ \t]*:|(?P<name>[A-Za-z_][\w-]*)",
    re.MULTILINE,
)
_TEMPERATURE = re.compile(r"^[^\"/\n]*\[[^\]\"/\n]*\btemperature\s*=", re.MULTILINE)


def _gbnf(asked: Constraint) -> str:
    try:
        return to_lark(asked.text)
    except ValueError as error:
        raise ValueError(f"it is not GBNF: {error}") from None


_WRITERS: dict[str, Callable[[Constraint], str]] = {
    JSON_OBJECT: _json_object,
    JSON_SCHEMA: _json_schema,
    REGEX: _regex,
    CHOICE: _choice,
    LARK: _lark,
    ESCAPED_LARK: _escaped_lark,
    GBNF: _gbnf,
}

# ---- refusals


def plain(why: str) -> str:
    """The compiler's words in one line, without its state."""
    lines = why.replace("<non-verbose/>", "").split("<state>")[0].splitlines()
    source = next((i for i, line in enumerate(lines) if _SOURCE.match(line)), len(lines))
    why = _PLACE.sub("", " ".join(" ".join(lines[:source]).split()))
    return "no text satisfies it" if why.startswith("NoExtension") else why


_SOURCE = re.compile(r"\s*\d+ \| ")  # from here on it shows the grammar, which has our own words in it
_PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
_KEYS = re.compile(r"Unimplemented keys: \[(.*?)\]")


def _refusal(constraint: Constraint, why: str) -> BadRequest:
    """The compiler's complaint, in one line that begins with what the client can change."""
    why = plain(why)
    if keys := _KEYS.search(why):
        names = ", ".join(json.loads(f"[{keys[1]}]"))
        what = f"the keyword{'s' if ', ' in names else ''} {names} cannot be enforced"
        cure = "leave it out, or say it another way: docs/structured-output.md has what can be"
    elif "oneOf constraints are not supported" in why:
        what, cure = "the keyword oneOf cannot be enforced where its branches overlap", "use anyOf, if either will do"
    else:
        what, cure = f"it cannot be enforced: {why}"[:400], ""
    return BadRequest(f"{constraint.param}: {what}", cure=cure, param=constraint.param, code="unsupported_constraint")
