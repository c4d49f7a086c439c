"""A check of a detected format against its template: what the template renders for random turns must parse back to those turns.

For each turn the rendered text is parsed whole, character by character and, for some, cut at every place; the
same reasoning, text and calls must come out as went in. What a template does not write at all (some drop the text beside
calls, some the reasoning) is not asked for. The score says how many turns came back; it is told, never hidden.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from quire.chat.templates.template import ChatTemplate
from quire.chat.tools.detect import SpecialTokens
from quire.chat.tools.probe import TurnRenderer, called, tool
from quire.chat.tools.types import Format, Pieces, Reading, Tool, Tools
from quire.observe.errors import BadRequest

TURNS = {"tools": 24, "reasoning": 8}
_WORDS = (
    "river",
    "Straße",
    "naïve",
    "東京",
    "🙂",
    "x < y",
    "a & b",
    "50%",
    "'quoted'",
    '"so"',
    "back\\slash",
    "{brace}",
    "[1]",
)
_SCHEMA: dict[str, Any] = {
    "city": {"type": "string", "description": "A place."},
    "note": {"type": "string", "description": "Any text."},
    "days": {"type": "integer", "description": "How many."},
    "ratio": {"type": "number", "description": "A share."},
    "exact": {"type": "boolean", "description": "A switch."},
    "tags": {"type": "array", "items": {"type": "string"}, "description": "Words."},
    "where": {
        "type": "object",
        "description": "A place in detail.",
        "properties": {"lat": {"type": "number"}, "names": {"type": "array", "items": {"type": "string"}}},
        "additionalProperties": {"type": "string"},
    },
}
TOOLS = [tool("get_weather", _SCHEMA, ["city"]), tool("search-files", _SCHEMA), tool("now", {})]
OFFERED = Tools(
    tools=[Tool(t["function"]["name"], "", t["function"]["parameters"]) for t in TOOLS],
)


@dataclass(slots=True)
class Score:
    """The result of trying a format on samples."""

    format: str
    tools: tuple[int, int] | None = None  # read back, of how many; None: the format has none
    reasoning: tuple[int, int] | None = None
    failed: list[str] = field(default_factory=list)  # what went wrong first, for each kind

    @property
    def whole(self) -> bool:
        """Whether every sample came back as it was."""
        return all(s is None or s[0] == s[1] for s in (self.tools, self.reasoning))

    def __str__(self) -> str:
        told = [f"{name} {s[0]}/{s[1]}" for name, s in (("tools", self.tools), ("reasoning", self.reasoning)) if s]
        return ", ".join(told) or "nothing to check"


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of a conversation, to be written by the template and read back."""

    text: str
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()

    def message(self) -> dict[str, Any]:
        made: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.calls:
            made["tool_calls"] = [called(n, a, f"abcdefg{i:02d}") for i, (n, a) in enumerate(self.calls)]
        return made


def check(
    template: ChatTemplate, tokenizer: SpecialTokens, form: Format, *, seed: int = 0, every: int = 1, part: int = 1
) -> Score:
    """Try the format. `every` turns of each kind are cut at every place; `part` 3 is a third of the turns."""
    renderer = TurnRenderer(template, [tokenizer.token_text(i) for i in tokenizer.eos_ids])
    score = Score(form.name)
    for kind, has in (("tools", form.calls), ("reasoning", form.reasons)):
        if not has:
            continue
        right = asked = 0
        for n, sample in enumerate(islice(samples(kind, random.Random(f"{kind} {seed}")), TURNS[kind] // part)):
            wrong = trial(renderer, form, sample, split=n < every)
            if wrong is None:
                continue
            asked += 1
            right += not wrong
            if wrong and not any(f.startswith(kind) for f in score.failed):
                score.failed.append(f"{kind}: {wrong}")
        if asked:
            setattr(score, kind, (right, asked))
    return score


def samples(kind: str, rng: random.Random) -> Iterator[Sample]:
    """Random turns of a kind."""
    for n in range(TURNS[kind]):
        text = _text(rng) if n % 3 else ""
        if kind == "reasoning":
            yield Sample(text=_text(rng), reasoning="\n".join(_text(rng) for _ in range(1 + n % 3)))
            continue
        count = 1 if n % 2 else 1 + n % 3
        calls = tuple((rng.choice(OFFERED.tools).name, n) for n in range(count))
        yield Sample(
            text=text,
            reasoning=_text(rng) if n % 4 == 3 else "",
            calls=tuple((name, {} if name == "now" else _arguments(rng)) for name, _ in calls),
        )


def trial(renderer: TurnRenderer, form: Format, sample: Sample, *, split: bool) -> str | None:
    """The reason why one turn did not come back; "" if it did, None where the template does not write it."""
    try:
        written = renderer.turn(sample.message(), TOOLS if sample.calls else None)
    except BadRequest:
        return None
    whole = written.before[-400:] + written.text
    if any(name not in written.text for name, _ in sample.calls):
        return None
    if not sample.calls and sample.reasoning not in whole:
        return None
    offered = OFFERED if sample.calls else Tools()
    # A prompt that begins the reasoning may write its beginning in other words than the template does afterwards.
    tails = (written.before, written.prompt) if sample.reasoning in whole and sample.reasoning else (written.before,)
    readings = [form.reading(tail[-400:], offered) for tail in tails]
    expected = (
        sample.reasoning if sample.reasoning in whole else "",
        sample.text if sample.text in written.text else "",
        [(name, arguments) for name, arguments in sample.calls],
    )
    wrong = ""
    for reading in readings:
        wrong = _compare(reading, written.text, expected, split)
        if not wrong:
            break
    return wrong


def _compare(reading: Reading, text: str, expected: Any, split: bool) -> str:
    for cuts in _cuts(text, split):
        reasoning, said, calls = parse(reading, cuts)
        got = (reasoning, said.strip(), calls)  # some templates put spaces around a text
        if got != expected:
            return f"{got!r} instead of {expected!r}, written {text!r}"
    return ""


def parse(reading: Reading, texts: Iterable[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, text and calls of an answer that comes in pieces."""
    parser = reading.parser()
    pieces: list[Pieces] = []
    for text in texts:
        pieces += parser.feed(text)
    pieces += parser.finish()
    calls: dict[int, list[str]] = {}
    for part in (part for piece in pieces for part in piece.calls):
        calls.setdefault(part.index, [part.name or ""]).append(part.arguments)
    return (
        "".join(p.reasoning for p in pieces),
        "".join(p.text for p in pieces),
        [(name, _loads("".join(parts))) for _, (name, *parts) in sorted(calls.items())],
    )


def _cuts(text: str, split: bool) -> Iterator[list[str]]:
    yield [text]
    yield list(text)
    if split:
        for at in range(1, len(text)):
            yield [text[:at], text[at:]]


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(rng: random.Random) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(2, 6)))


def _arguments(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {
        "city": _text(rng),
        "note": rng.choice(["two\nlines", "  indented\n\tand\n", "5", "true", "null", "", '{"a": [1, 2]}', _text(rng)]),
        "days": rng.randint(-5, 10**6),
        "ratio": rng.choice([0.5, -1.25, 1e-7, 3.0]),
        "exact": rng.random() < 0.5,
        "tags": [_text(rng) for _ in range(rng.randint(0, 3))],
        "where": {"lat": 48.5, "names": [_text(rng), "Łódź"]},
    }
    keys = rng.sample(list(made), rng.randint(1, len(made)))
    return {key: made[key] for key in made if key in keys}
